"""What the observers read off vLLM's objects, and how that is found in their own source.

`READS` is the one table; `derived` keeps it honest.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

OBSERVERS = tuple(
    Path(__file__).resolve().parents[2] / "llmobs" / name
    for name in ("frontend.py", "engine.py", "kv_cache.py", "worker.py")
)


@dataclass(frozen=True)
class Read:
    """Attributes of the class at `place`, `module:Class`. `a|b`: either. `a?`: asked for with a
    fallback, for it is not in every version."""

    place: str
    names: str

    @property
    def wanted(self) -> list[tuple[str, ...]]:
        """Of each of these at least one."""
        return [tuple(n.split("|")) for n in self.names.split() if not n.endswith("?")]

    @property
    def all(self) -> set[str]:
        return set(self.names.replace("|", " ").replace("?", "").split())


READS = (
    Read(
        "vllm.config.vllm:VllmConfig",
        "model_config parallel_config speculative_config observability_config device_config",
    ),
    Read("vllm.config.model:ModelConfig", "served_model_name is_diffusion?"),
    Read(
        "vllm.config.parallel:ParallelConfig",
        "data_parallel_index|data_parallel_rank distributed_executor_backend _api_process_rank?",
    ),
    Read("vllm.config.device:DeviceConfig", "device_type"),
    Read("vllm.v1.worker.gpu_worker:Worker", "device"),
    Read("vllm.config.observability:ObservabilityConfig", "otlp_traces_endpoint"),
    Read(
        "vllm.v1.engine:EngineCoreRequest",
        "request_id sampling_params lora_request prompt_token_ids prompt_embeds arrival_time",
    ),
    Read("vllm.lora.request:LoRARequest", "lora_name"),
    Read("vllm.sampling_params:SamplingParams", "stop max_tokens n"),
    Read("vllm.v1.engine.parallel_sampling:ParentRequest", "request_id sampling_params"),
    Read("vllm.v1.engine.output_processor:OutputProcessor", "request_states"),
    Read(
        "vllm.v1.engine.output_processor:RequestState",
        "request_id detokenizer is_prefilling num_cached_tokens prompt_len",
    ),
    Read("vllm.v1.engine.detokenizer:IncrementalDetokenizer", "num_output_tokens"),
    Read("vllm.outputs:RequestOutput", "outputs"),
    Read("vllm.outputs:CompletionOutput", "token_ids finish_reason"),
    Read(
        "vllm.v1.request:Request",
        "request_id sampling_params lora_request status num_prompt_tokens num_computed_tokens "
        "num_tokens num_output_tokens _output_token_ids|output_token_ids resumable?",
    ),
    Read(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "requests running kv_cache_manager max_num_running_reqs max_num_scheduled_tokens "
        "_pause_state deferred_waiting|skipped_waiting",
    ),
    Read(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        "usage block_pool coordinator kv_cache_config allocate_slots can_fit_full_sequence?",
    ),
    Read("vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator", "single_type_managers"),
    Read(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
        "block_pool req_to_blocks get_num_skipped_tokens",
    ),
    Read("vllm.v1.core.block_pool:BlockPool", "free_block_queue num_gpu_blocks"),
    Read("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue", "num_free_blocks"),
    Read("vllm.v1.core.kv_cache_utils:KVCacheBlock", "is_null"),
    Read("vllm.v1.kv_cache_interface:KVCacheConfig", "kv_cache_tensors"),
    Read(
        "vllm.v1.kv_cache_interface:KVCacheTensor",
        "size block_stride? host_resident?",
    ),
    Read(
        "vllm.v1.core.sched.output:SchedulerOutput",
        "total_num_scheduled_tokens num_scheduled_tokens scheduled_new_reqs "
        "scheduled_spec_decode_tokens",
    ),
    Read("vllm.v1.core.sched.output:NewRequestData", "req_id"),
    Read("vllm.v1.outputs:ModelRunnerOutput", "req_ids sampled_token_ids"),
    Read("vllm.v1.engine:EngineCoreOutputs", "outputs scheduler_stats"),
    Read("vllm.v1.engine:EngineCoreOutput", "request_id new_token_ids"),
    Read("vllm.v1.metrics.stats:SchedulerStats", "spec_decoding_stats"),
    Read("vllm.v1.spec_decode.metrics:SpecDecodingStats", "num_draft_tokens num_accepted_tokens"),
    Read("vllm.exceptions:GracefulHTTPError", "http_status?"),
    Read("uvicorn.config:Config", "loaded_app"),
)

MEMBERS = (
    (
        "vllm.v1.request:RequestStatus",
        "FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_REPETITION "
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR WAITING_FOR_REMOTE_KVS WAITING_FOR_STREAMING_REQ",
    ),
    ("vllm.v1.core.sched.interface:PauseState", "UNPAUSED"),
)
"""Members of enumerations that the observers know by name."""
FINISH_REASON = (
    "vllm.v1.engine:FinishReason",
    {"STOP": 0, "LENGTH": 1, "ABORT": 2, "ERROR": 3, "REPETITION": 4},
)
"""The one that they know by number."""

PYTHONS = frozenset(
    (
        "get",
        "items",
        "keys",
        "values",
        "pop",
        "startswith",
        "append",
        "aclose",
        "name",
        "__version__",
        "type",
    )
)
"""Attributes of Python's own types: what is in a message or a dictionary, or an enumeration's
member; what a module says of itself; and PyTorch's of a device."""
PASSES = {"next", "anext", "iter", "list", "tuple", "sorted", "reversed", "getattr", "zip"}


class _Function(ast.NodeVisitor):
    """Follows the objects that are not ours through one function: they come in as parameters of
    type Any, and all that is got out of them is not ours either."""

    def __init__(self, foreign: set[str], fields: set[str]) -> None:
        self.foreign = foreign
        self.fields = fields
        self.read: set[str] = set()
        self.asked: set[str] = set()

    def is_foreign(self, node: ast.expr | None) -> bool:
        match node:
            case ast.Name():
                return node.id in self.foreign
            case ast.Attribute():
                return node.attr in self.fields or self.is_foreign(node.value)
            case ast.Subscript() | ast.Starred() | ast.Await() | ast.NamedExpr():
                return self.is_foreign(node.value)
            case ast.Call(func=ast.Name(id=name)):
                return name in PASSES and any(map(self.is_foreign, node.args))
            case ast.Call():
                return self.is_foreign(node.func)
            case ast.BoolOp():
                return any(map(self.is_foreign, node.values))
            case ast.IfExp():
                return self.is_foreign(node.body) or self.is_foreign(node.orelse)
            case ast.Tuple() | ast.List() | ast.Set():
                return any(map(self.is_foreign, node.elts))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self.is_foreign(node.elt)
        return False

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self.bind(one, its)
        elif self.is_foreign(value):
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            self.foreign |= {t.id for t in targets if isinstance(t, ast.Name)}

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self.bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and _is_any(node.annotation):
            self.bind(node.target, node.value)
            if isinstance(node.target, ast.Attribute) and self.is_foreign(node.value):
                self.fields.add(node.target.attr)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.bind(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.foreign |= {alias.name for alias in node.names if alias.name == "vllm"}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load) and self.is_foreign(node.value):
            self.read.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(
                func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]
            ) if not name.startswith("VLLM_"):  # that is one of the user's variables
                self.asked.add(name)
        self.generic_visit(node)


def _is_any(annotation: ast.expr | None) -> bool:
    return annotation is None or any(
        isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation)
    )


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = function.args
    everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    everything += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return {a.arg for a in everything if a.arg != "self" and _is_any(a.annotation)}


def derived(text: str) -> tuple[set[str], set[str]]:
    """The attributes that this source reads off what is not ours, and those that it asks for with
    `getattr`."""
    tree = ast.parse(text)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    fields = set()  # of our own objects, that hold what is not ours
    for function in functions:
        given = _parameters(function)
        for node in ast.walk(function):
            match node:
                case ast.Assign(
                    targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)],
                    value=ast.Name(id=value),
                ) if value in given:
                    fields.add(name)
    read, asked = set(), set()
    for function in functions:
        visitor = _Function(_parameters(function), fields)
        before = -1
        while before != len(visitor.foreign):  # what a loop's end tells its start
            before = len(visitor.foreign)
            visitor.generic_visit(function)
        read |= visitor.read
        asked |= visitor.asked
    return read - PYTHONS - asked, asked - PYTHONS
