/* A stand-in for libnvidia-ml.so.1 whose figures and faults are in a file, read anew at each call.
 *
 * The file is named by STAND_IN_NVML; a line is a key and a value:
 *   gpus 2                           GPUs there are
 *   error.nvmlDeviceGetPowerUsage 3  what a function returns in place of success, for all GPUs
 *   error.nvmlInitWithFlags 9
 *   hang.nvmlDeviceGetPowerUsage 1   it does not return as long as this line stands
 *   0.uuid GPU-…  0.name H100  0.total 85899345920  0.field.197 12345
 *   1.error.nvmlDeviceGetPowerUsage 15   the same for GPU 1 alone; 1.error.all for whatever it is asked
 *   1.instances 2                    MIG instances of GPU 1, which are 1:0 and 1:1
 *   1:0.used 1024
 * What is not in the file has no figure: NOT_SUPPORTED. Built with OLD_DRIVER it lacks the functions
 * that came with newer drivers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long Big;
typedef struct { int gpu, instance; char name[16]; } Device;
enum { OK, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, SMALL = 7, TIMEOUT = 10,
       VERSION = 25 };

static Device devices[16][9];
static int initialised, registered[16], delivered[16];

static int text(const char *key, char *value, int size)
{
    char line[256], *end;
    const char *path = getenv("STAND_IN_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if ((end = strchr(line, ' ')) && (*end = 0, !strcmp(line, key))) {
            strncpy(value, end + 1, size - 1);
            value[size - 1] = 0;
            found = 1;
        }
    }
    if (file)
        fclose(file);
    return found;
}

static int number(const char *owner, const char *key, Big *value)
{
    char full[128], found[64];
    snprintf(full, sizeof full, "%s%s%s", owner, *owner ? "." : "", key);
    if (!text(full, found, sizeof found))
        return 0;
    *value = strtoull(found, NULL, 0);
    return 1;
}

static Big count(const char *owner, const char *key)
{
    Big value;
    return number(owner, key, &value) ? value : 0;
}

static int enter(const char *function, const Device *device)
{
    char key[128];
    Big value;
    snprintf(key, sizeof key, "hang.%s", function);
    while (number("", key, &value))
        usleep(10000);
    snprintf(key, sizeof key, "error.%s", function);
    if (number("", key, &value) || (device && number(device->name, key, &value)))
        return value;
    if (device && number(device->name, "error.all", &value))
        return value;
    return initialised ? OK : UNINITIALIZED;
}

#define ENTER(device) do { int fault = enter(__func__, device); if (fault) return fault; } while (0)
#define GET(device, key, into) \
    do { Big found; if (!number((device)->name, key, &found)) return NOT_SUPPORTED; into = found; } while (0)

int nvmlInitWithFlags(unsigned flags)
{
    int fault = enter(__func__, NULL);
    if (fault && fault != UNINITIALIZED)
        return fault;
    initialised = 1;
    memset(registered, 0, sizeof registered);
    return OK;
}
int nvmlShutdown(void) { ENTER(NULL); initialised = 0; return OK; }
const char *nvmlErrorString(int code) { return "an error of the stand-in"; }

static int string(const Device *device, const char *key, char *into, unsigned size)
{
    char full[64];
    snprintf(full, sizeof full, "%s.%s", device->name, key);
    return text(full, into, size) ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetCount_v2(unsigned *gpus) { ENTER(NULL); *gpus = count("", "gpus"); return OK; }

static Device *device(int gpu, int instance)
{
    Device *d = &devices[gpu][instance + 1];
    d->gpu = gpu;
    d->instance = instance;
    snprintf(d->name, sizeof d->name, instance < 0 ? "%d" : "%d:%d", gpu, instance);
    return d;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **handle)
{
    if (index >= count("", "gpus"))
        return INVALID_ARGUMENT;
    *handle = device(index, -1);
    ENTER(*handle);
    return OK;
}
int nvmlDeviceGetName(Device *d, char *name, unsigned n) { ENTER(d); return string(d, "name", name, n); }
int nvmlDeviceGetUUID(Device *d, char *uuid, unsigned n) { ENTER(d); return string(d, "uuid", uuid, n); }

int nvmlDeviceGetMigMode(Device *d, unsigned *now, unsigned *pending)
{
    ENTER(d);
    GET(d, "instances", *now);
    *pending = *now = *now > 0;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *most) { ENTER(d); *most = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **handle)
{
    ENTER(d);
    if (index >= count(d->name, "instances"))
        return NOT_FOUND;
    *handle = device(d->gpu, index);
    return OK;
}

typedef struct { Big total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device *d, Memory *m)
{
    ENTER(d);
    GET(d, "total", m->total);
    GET(d, "free", m->free);
    m->used = m->total - m->free;
    return OK;
}

typedef struct { unsigned gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(Device *d, Utilization *u)
{
    ENTER(d);
    GET(d, "utilization", u->gpu);
    u->memory = 0;
    return OK;
}
int nvmlDeviceGetPowerUsage(Device *d, unsigned *milliwatts) { ENTER(d); GET(d, "power", *milliwatts); return OK; }
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *d, Big *bits) { ENTER(d); GET(d, "throttled", *bits); return OK; }
int nvmlDeviceGetSupportedClocksThrottleReasons(Device *d, Big *bits) { ENTER(d); GET(d, "throttles", *bits); return OK; }
int nvmlDeviceGetPcieThroughput(Device *d, int direction, unsigned *rate)
{
    ENTER(d);
    GET(d, direction ? "rate.rx" : "rate.tx", *rate);
    return OK;
}
int nvmlDeviceGetNvLinkState(Device *d, unsigned link, unsigned *active)
{
    char key[32];
    ENTER(d);
    if (!count(d->name, "links"))
        return NOT_SUPPORTED;
    if (link >= count(d->name, "links"))
        return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "down.%u", link);
    *active = !count(d->name, key);
    return OK;
}
int nvmlDeviceGetTotalEccErrors(Device *d, int type, int counter, Big *errors)
{
    ENTER(d);
    if (counter != 1)
        return INVALID_ARGUMENT;
    GET(d, type ? "ecc.uncorrected" : "ecc.corrected", *errors);
    return OK;
}

typedef struct { Device *device; Big type, data; unsigned gpu_instance, compute_instance; } Event;
int nvmlEventSetCreate(void **set) { ENTER(NULL); *set = registered; return OK; }
int nvmlEventSetFree(void *set) { ENTER(NULL); return OK; }
int nvmlDeviceRegisterEvents(Device *d, Big types, void *set)
{
    ENTER(d);
    if (types != 8)
        return NOT_SUPPORTED;
    registered[d->gpu] = 1;
    delivered[d->gpu] = count(d->name, "xids");
    return OK;
}
int nvmlEventSetWait_v2(void *set, Event *event, unsigned timeout)
{
    ENTER(NULL);
    for (int gpu = 0; gpu < 16; gpu++) {
        Device *d = device(gpu, -1);
        if (!registered[gpu] || delivered[gpu] >= (int)count(d->name, "xids"))
            continue;
        delivered[gpu]++;
        *event = (Event){d, 8, count(d->name, "xid"), ~0u, ~0u};
        return OK;
    }
    return TIMEOUT;
}

#ifndef OLD_DRIVER
typedef struct { unsigned version; Big total, reserved, free, used; } Memory2;
int nvmlDeviceGetMemoryInfo_v2(Device *d, Memory2 *m)
{
    ENTER(d);
    if (m->version != 0x02000028)
        return VERSION;
    GET(d, "total", m->total);
    GET(d, "reserved", m->reserved);
    GET(d, "free", m->free);
    m->used = m->total - m->reserved - m->free;
    return OK;
}
int nvmlDeviceGetCurrentClocksEventReasons(Device *d, Big *bits) { ENTER(d); GET(d, "throttled", *bits); return OK; }
int nvmlDeviceGetSupportedClocksEventReasons(Device *d, Big *bits) { ENTER(d); GET(d, "throttles", *bits); return OK; }

typedef struct { unsigned field, scope; long long time, latency; int type, result; Big value; } Field;
int nvmlDeviceGetFieldValues(Device *d, int n, Field *fields)
{
    char key[32];
    Big type;
    ENTER(d);
    for (Field *f = fields; f < fields + n; f++) {
        int per_link = f->field == 138 || f->field == 139 || f->field == 202 || f->field == 204;
        snprintf(key, sizeof key, "field.%u", f->field);
        f->result = number(d->name, key, &f->value) ? OK : NOT_SUPPORTED;
        if (!f->result && per_link && f->scope != ~0u)
            f->result = INVALID_ARGUMENT;
        snprintf(key, sizeof key, "type.%u", f->field);
        f->type = number(d->name, key, &type) ? (int)type : 3;
    }
    return OK;
}
#endif
