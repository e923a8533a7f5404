"""A coverage-guided fuzzer on the reader and on what the agent makes of a ring.

    pip install atheris numpy prometheus-client psutil wrapt    # in an environment of its own
    python -m tests.fuzz_reader -max_total_time=300 CORPUS

The input is the file: a header that is right but for what the input changes, totals, slots, and
then changes to it while it is read. Whatever it is, nothing but RingError comes out of the reader,
nothing out of the agent, and a ring beside it is read to its end.
"""

import logging
import os
import struct
import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["llmobs"]):
    from llmobs import schema
    from llmobs.agent.collect import RunCollector
    from llmobs.agent.run import Run
    from llmobs.ring import Reader, RingError, Writer

SLOT, SLOTS_AT = 104, 65536
INFO = [
    b'{"roles": ["api_server"], "models": ["m"]}',
    b'{"roles": ["engine_core", "worker"], "models": ["m"], "engine": 0}',
    b'{"roles": ["api_server", "engine_core", "worker"], "models": ["m", "a"]}',
]
KINDS = [int(kind) for kind in schema.Kind]


def ring(data: "atheris.FuzzedDataProvider", capacity: int, pid: int) -> bytearray:
    info = data.PickValueInList(INFO)
    header = struct.pack("<8sIIQIIQ", b"LLMOBSR1", 2, SLOT, capacity, pid, len(info), 1)
    content = bytearray((header.ljust(64, b"\0") + info).ljust(SLOTS_AT, b"\0"))
    number = data.ConsumeIntInRange(0, 3 * capacity)
    slots = bytearray(capacity * SLOT)
    for n in range(max(1, number - capacity + 1), number + 1):
        record = struct.pack(
            "<QBBHI9qqQ",
            *(n, data.PickValueInList(KINDS), data.ConsumeIntInRange(0, 5)),
            *(data.ConsumeIntInRange(0, 300), data.ConsumeIntInRange(0, 3)),
            *(data.ConsumeIntInRange(-1, 300) for _ in range(9)),
            *(data.ConsumeIntInRange(0, 100) * 10**7, n),
        )
        slots[n % capacity * SLOT : n % capacity * SLOT + SLOT] = record
    return content + slots


def splash(data: "atheris.FuzzedDataProvider", content: bytearray) -> None:
    for _ in range(data.ConsumeIntInRange(0, 4)):
        noise = data.ConsumeBytes(data.ConsumeIntInRange(1, 120))
        start = data.PickValueInList([0, 64, 16384, SLOTS_AT])
        at = min(start + data.ConsumeIntInRange(0, 2000), max(len(content) - len(noise), 0))
        content[at : at + len(noise)] = noise


def read(path: Path) -> None:
    try:
        reader = Reader(path)
        reader.info()
        reader.totals()
        seen = 0
        for _ in range(200):
            batch = reader.read()
            assert batch.lost >= 0
            for number in batch.records["head"].tolist():
                assert number > seen
                seen = number
            if not len(batch.records) and not batch.lost:
                break
        reader.close()
    except RingError:
        pass


def one(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        path = folder / "engine_core-1-1.ring"
        capacity = provider.ConsumeIntInRange(1, 12)
        content = ring(provider, capacity, provider.PickValueInList([os.getpid(), 5_000_000]))
        splash(provider, content)
        path.write_bytes(content)
        healthy = Writer(
            folder / "api_server-healthy.ring", 16, {"roles": ["api_server"], "models": ["healthy"]}
        )
        healthy.put(1, 10**9, 1, 1)
        healthy.put(5, 2 * 10**9, 1, 4, 400, 4, 0, 10**9)
        read(path)
        run = Run(folder)
        if provider.ConsumeBool():
            run.skip_to_newest()
        run.poll()
        for _ in range(provider.ConsumeIntInRange(0, 3)):
            splash(provider, content)
            with path.open("r+b") as file:
                file.write(content)
            run.poll()
        if provider.ConsumeIntInRange(0, 7) == 0:
            list(RunCollector(run).collect())
        ends = run.store.histograms["llmobs_request_seconds"]
        assert sum(ends["healthy", "unknown"].counts) >= 1
        for source in run.sources.values():
            source.reader.close()


if __name__ == "__main__":
    logging.disable()
    Run._prepare = lambda *_: None  # type: ignore[method-assign]  # most of the time, else
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
