"""The shapes in which vLLM runs: one table."""

from dataclasses import dataclass, field

from demo.vllm_server import MODULE
from tests.e2e.test_doors import SERVE

ONE_EACH = {"api_server": 1, "engine_core": 1, "worker": 1}
GRPC = ("-m", "vllm.entrypoints.launchers.grpc_server")
NGRAM = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,"prompt_lookup_min":2}'
STARVED = ("--num-gpu-blocks-override=24", "--no-enable-prefix-caching", "--max-model-len=2048")
LORA = ("--enable-lora", "--max-lora-rank=8", "--max-loras=2")


@dataclass(frozen=True)
class Shape:
    """One way to run vLLM.

    `start` is what Python runs for a server, or what a user's own program does (`LLM`, `AsyncLLM`,
    `EngineCore`: see library.py). `load` names what is sent (load.py). `processes` are the
    observed ones by role, `inside` says that one process has all roles. `as_asked` takes back what
    vLLM's CPU platform decides by itself: it forces spawn, and async scheduling off. `proof` must
    stand in the log, else the shape was not what it says. EXTRAS in `env` is the folder of what
    `make shapes` installs for these tests alone. `short` ones also run in `make test`.
    """

    name: str
    start: str | tuple[str, ...]
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    kind: str = "llama"
    load: str = "mixed"
    processes: dict[str, int] = field(default_factory=lambda: dict(ONE_EACH))
    inside: bool = False
    as_asked: bool = False
    proof: str = ""
    vllm_counts: bool = True
    """Whether vLLM's own page is there to compare with."""
    short: bool = False


DEBUG = {"VLLM_LOGGING_LEVEL": "DEBUG"}
ASYNC = "Batch queue is enabled with size 2"

SHAPES = (
    Shape("one API server, spawned engine and worker", MODULE),
    Shape("no async scheduling", MODULE, ("--no-async-scheduling",)),
    Shape("async scheduling", MODULE, ("--async-scheduling",), DEBUG, as_asked=True, proof=ASYNC),
    Shape(
        *("async scheduling, KV cache starved", MODULE, ("--async-scheduling", *STARVED), DEBUG),
        load="storm",
        as_asked=True,
        proof=ASYNC,
    ),
    Shape(
        *("async scheduling, LoRA", MODULE, ("--async-scheduling", *LORA), DEBUG),
        load="adapters",
        as_asked=True,
        proof=ASYNC,
        short=True,
    ),
    Shape(
        *("two API servers", SERVE, ("--api-server-count=2",)),
        processes={**ONE_EACH, "api_server": 2},
    ),
    Shape(
        *("two engines, data parallel", MODULE, ("--data-parallel-size=2",)),
        processes={"api_server": 1, "engine_core": 2, "worker": 2},
    ),
    Shape(
        *("vllm serve --data-parallel-size 2 (two API servers)", SERVE),
        args=("--data-parallel-size=2",),
        processes={"api_server": 2, "engine_core": 2, "worker": 2},
        short=True,
    ),
    Shape("no statistics", MODULE, ("--disable-log-stats",), vllm_counts=False),
    Shape("vLLM's own tracing", MODULE, ("--otlp-traces-endpoint=RECEIVER",), load="traced"),
    Shape("LoRA", MODULE, LORA, load="adapters"),
    Shape(
        *("LoRA loaded at run time", MODULE, LORA),
        env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        load="adapters at run time",
    ),
    Shape("DeepseekV3 (MLA, MoE)", MODULE, ("--dtype=bfloat16",), kind="deepseek"),
    Shape(
        *("DeepseekV3, --disable-log-stats", MODULE, ("--dtype=bfloat16", "--disable-log-stats")),
        kind="deepseek",
        vllm_counts=False,
        short=True,
    ),
    Shape("ngram speculation", MODULE, ("--speculative-config", NGRAM), load="repetitive"),
    Shape("pooling model", MODULE, ("--runner=pooling",), kind="embedding", load="pooling"),
    Shape("two servers on one host", MODULE, load="two servers"),
    Shape(
        *("vLLM's Rust front end", SERVE),
        env={
            "VLLM_USE_RUST_FRONTEND": "1",
            "VLLM_RUST_FRONTEND_PATH": "EXTRAS/vllm-rs",
        },
        load="foreign",
        processes={"engine_core": 1, "worker": 1},
        vllm_counts=False,
    ),
    Shape("vLLM's gRPC server", GRPC, env={"PYTHONPATH": "EXTRAS"}, load="grpc", vllm_counts=False),
    Shape("LLM, spawned", "LLM", vllm_counts=False),
    Shape(
        *("LLM, forked", "LLM"),
        env={"VLLM_WORKER_MULTIPROC_METHOD": "fork"},
        as_asked=True,
        vllm_counts=False,
        short=True,
    ),
    Shape(
        *("LLM, VLLM_ENABLE_V1_MULTIPROCESSING=0", "LLM"),
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        inside=True,
        vllm_counts=False,
    ),
    Shape("AsyncLLM in a program", "AsyncLLM", vllm_counts=False),
    Shape(
        *("a foreign front end on the engine core", "EngineCore"),
        processes={"engine_core": 1, "worker": 1},
        vllm_counts=False,
        short=True,
    ),
)
