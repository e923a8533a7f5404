"""What llmobs tells of a server, and why it may not: the table of features.

A feature is available unless something is known that stands in its way; what is not known yet is no
reason.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """What it tells, and the reasons that can keep it from that."""

    name: str
    tells: str
    reasons: tuple[str, ...]


MEANING = {
    "foreign_frontend": "requests come to the engine from a front end that llmobs does not see "
    "(vLLM's Rust front end, one on another host, one of a program's own); the engine's steps, "
    "queue and tokens are told all the same",
    "grpc": "requests come over vLLM's gRPC server: they are told from their hand-over to the "
    "engine on, and those refused before are not",
    "ray": "the workers are actors that Ray starts by itself, maybe on another host: nothing is "
    "told of them",
    "few_prefills": "no hour so far had 30 prefills",
    "few_lengths": "lately there were prefills of fewer than three clearly different lengths: what "
    "is constant, linear and quadratic cannot be told apart",
    "no_proc": "/proc does not tell, or not all of it",
    "no_schedstat": "this kernel keeps no schedstat (CONFIG_SCHED_INFO)",
    "no_psi": "this kernel keeps no pressure stall information (CONFIG_PSI, psi=1 at boot)",
    "no_cgroup": "the server is in no cgroup with a CPU controller, or in none that the agent can "
    "see",
    "no_permission": "the agent may not read it",
    "no_gpu": "the server uses no NVIDIA GPU",
    "no_driver": "NVIDIA's driver is not to be had: its library libnvidia-ml.so.1 is not found (in "
    "a container, NVIDIA_DRIVER_CAPABILITIES must contain `utility`), or the driver is not loaded",
    "no_library": "the package nvidia-ml-py, which llmobs needs, is not installed for the agent",
    "old_library": "the module `pynvml` that Python finds is not that of nvidia-ml-py: "
    "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py",
    "not_supported": "the GPU, its driver or PyTorch does not tell it (MIG instances have memory "
    "figures alone)",
    "lost": "a GPU, or its driver, went away while the server ran; it is tried again",
    "driver_error": "NVIDIA's driver answers with an error; it is tried again",
    "no_answer": "NVIDIA's driver does not answer",
    "unknown_gpu": "which of the machine's GPUs the server uses cannot be told from what its "
    "workers say",
    "failed": "it failed in the server, whose log says how; the server is unaffected",
    "no_kv_pool": "the scheduler has no pool of KV-cache blocks where llmobs looks for it: a model "
    "without attention, a scheduler of a program's own, or a vLLM in which a probe has no place",
}
"""The values of the label `reason`, for a person."""

NVML = (
    *("ray", "no_gpu", "no_driver", "no_library", "old_library", "not_supported", "no_permission"),
    *("lost", "driver_error", "no_answer", "unknown_gpu"),
)
"""What can keep NVML from telling something."""

FEATURES = (
    Feature(
        "front_end",
        "requests: outcomes, phases, first tokens, lengths",
        ("foreign_frontend",),
    ),
    Feature(
        "http_edge",
        "the arrival of requests, their status and delivery, as the HTTP server sees them",
        ("foreign_frontend", "grpc"),
    ),
    Feature(
        "latency_model",
        "the coefficients of prefill time by length",
        ("few_prefills", "few_lengths"),
    ),
    Feature("worker", "forward and sampling times", ("ray",)),
    Feature(
        "host_cpu",
        "the machine's CPU time by mode, and its load",
        ("no_proc", "no_permission"),
    ),
    Feature(
        "run_queue",
        "how long the server's processes were ready to run and had no CPU",
        ("no_schedstat", "no_permission"),
    ),
    Feature(
        "cgroup_cpu",
        "how a CPU quota throttled the server",
        ("no_cgroup", "no_permission"),
    ),
    Feature("pressure", "the machine's pressure stalls", ("no_psi", "no_permission")),
    *(
        Feature(name, tells, NVML)
        for name, tells in (
            ("gpu_memory", "memory of the GPUs that the server uses, and the pressure on it"),
            ("gpu_utilization", "how busy those GPUs are"),
            ("gpu_power", "their power"),
            ("gpu_throttling", "what slows down their clocks"),
            ("gpu_pcie", "their traffic over PCIe"),
            ("gpu_nvlink", "their NVLinks, and the traffic over them"),
            ("gpu_ecc", "their memory errors"),
            ("gpu_xid", "the errors that the driver reports of them"),
        )
    ),
    Feature(
        "gpu_memory_effective",
        "the pressure on GPU memory, without the KV-cache blocks that are free",
        (*NVML, "no_kv_pool"),
    ),
    Feature("torch_memory", "memory of PyTorch's allocator", ("ray", "no_gpu", "not_supported")),
    Feature(
        "gpu_clock",
        "how long forward and sampling took on the GPU",
        ("no_gpu", "failed", "ray"),
    ),
    Feature("kv_cache", "KV-cache blocks: in use, handed out, evicted", ("no_kv_pool",)),
)
GPU_FEATURES = tuple(
    f.name
    for f in FEATURES
    if f.name.startswith(("gpu_", "torch_")) and f.name != "gpu_clock"  # the worker's own to say
)
