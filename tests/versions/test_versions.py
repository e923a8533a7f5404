"""vLLM's versions have what llmobs looks at; and the check would notice if one did not."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.versions import __main__ as command
from tests.versions.check import check, installed
from tests.versions.page import PAGE, page
from tests.versions.reads import OBSERVERS, READS, derived
from tests.versions.source import Absent, Source
from tests.versions.wheel import PINNED, Wheel, newest

NEWEST = max(PINNED, key=lambda version: [int(part) for part in version.split(".")])


def test_the_pinned_ones() -> None:
    assert {"0.20.2", "0.25.1", "0.30.0", "0.31.0", "0.32.0", "0.33.0"} <= set(PINNED)


@pytest.mark.parametrize("version", PINNED)
def test_all_that_is_looked_at_is_there(version: str) -> None:
    report = check(Source(Wheel(version, PINNED[version]).text), installed("uvicorn"))
    assert report.problems == []
    assert report.targets == 26
    assert report.parameters >= 15
    assert report.attributes >= 70
    # What a version may lack is read with a fallback.
    expected = {
        "0.20.2": [
            "ModelConfig.is_diffusion",
            "KVCacheTensor.block_stride",
            "KVCacheTensor.host_resident",
            "GracefulHTTPError.http_status",
        ],
        "0.25.1": [
            "KVCacheManager.can_fit_full_sequence",
            "KVCacheTensor.host_resident",
            "GracefulHTTPError.http_status",
        ],
    }
    fits = ["KVCacheManager.can_fit_full_sequence"]  # became a part of allocate_slots
    assert report.later == expected.get(version, fits)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run make versions"


# The check notices what is gone

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
REQUEST = "vllm/v1/request.py"
ENGINE = "vllm/v1/engine/__init__.py"
PROCESSOR = "vllm/v1/engine/output_processor.py"
ASYNC = "vllm/v1/engine/async_llm.py"
HEADERS = "vllm/entrypoints/serve/engine/serving.py"
BEAMS = "vllm/entrypoints/generate/beam_search/online.py"
GONE = [
    # A method, its class, its module.
    (SCHEDULER, r"def _free_request\(", "def _release_request(", "probe leave: "),
    (SCHEDULER, r"class Scheduler\(", "class Planner(", "probe schedule: "),
    ("vllm/v1/worker/gpu_worker.py", r".*", None, "probe forward: "),
    ("vllm/v1/worker/gpu_worker.py", r".*", None, "no module vllm.v1.worker.gpu_worker"),
    # A parameter.
    (SCHEDULER, r"(def _preempt_request\(\s*self,\s*)request\b", r"\1victim", "probe preempt: "),
    (SCHEDULER, r"(def _preempt_request\(\s*self,\s*)request\b", r"\1victim", "parameter request"),
    # Only inherited any more.
    (
        SCHEDULER,
        r"class Scheduler\(",
        "class Base:\n    def schedule(self): ...\nclass Scheduler(Base, ",
        None,
    ),
    # Another kind of function: what it returns would be something else.
    (SCHEDULER, r"def schedule\(", "async def schedule(", "is a coroutine, not a function"),
    (ASYNC, r"async def add_request\(", "def add_request(", "is a function, not a coroutine"),
    (BEAMS, r"\byield\b", "await", "is a coroutine, not a coroutine that yields"),
    (HEADERS, r"async def _get_trace_headers", "async def _headers", "probe trace_headers: "),
    # An attribute: assigned, a property, of a dataclass; a member; a number.
    (SCHEDULER, r"self\.max_num_running_reqs\b", "self.most", "has no max_num_running_reqs"),
    (SCHEDULER, r"self\.deferred_waiting\b", "self.aside", "deferred_waiting or skipped_waiting"),
    (REQUEST, r"def num_tokens\(", "def tokens(", "Request has no num_tokens"),
    (REQUEST, r"WAITING_FOR_REMOTE_KVS", "WAITING_FOR_KV", "no WAITING_FOR_REMOTE_KVS"),
    (PROCESSOR, r"self\.is_prefilling\b", "self.prefilling", "RequestState has no is_prefilling"),
    (ENGINE, r"new_token_ids: ", "token_ids: ", "EngineCoreOutput has no new_token_ids"),
    (ENGINE, r"ABORT = 2", "ABORT = 3", "FinishReason.ABORT is 3, not 2"),
    ("vllm/config/model.py", r"served_model_name\b", "name", "no served_model_name"),
]


def changed(path: str, pattern: str, new: str | None) -> Callable[[str], str | None]:
    """The newest vLLM's files, with one changed, or gone."""
    wheel = Wheel(NEWEST, PINNED[NEWEST])

    def text(name: str) -> str | None:
        found = wheel.text(name)
        if name != path or found is None:
            return found
        assert re.search(pattern, found), f"{pattern} is not in {path}"
        return None if new is None else re.sub(pattern, new, found)

    return text


@pytest.mark.parametrize(("path", "pattern", "new", "told"), GONE)
def test_what_is_gone_is_noticed(path: str, pattern: str, new: str | None, told: str) -> None:
    problems = check(Source(changed(path, pattern, new)), installed("uvicorn")).problems
    if told is None:  # a base more changes nothing
        assert problems == []
    else:
        assert [problem for problem in problems if told in problem], problems


def test_a_method_that_is_only_inherited_is_not_there() -> None:
    modules = {"a.py": "class A:\n  def f(self): ...\nclass B(A):\n  x = 1\n"}
    source = Source(modules.get)
    assert source.function("a", "A", "f").name == "f"
    with pytest.raises(Absent, match="B does not define f"):
        source.function("a", "B", "f")
    assert set(source.attributes("a", "B")) == {"f", "x"}


def test_a_class_is_followed_to_where_it_comes_from() -> None:
    modules = {
        "p/__init__.py": "from .a import A as B\n",
        "p/a.py": "from p.q.b import Base\nclass A(Base):\n  def f(self): self.y: int = 1\n",
        "p/q/__init__.py": "",
        "p/q/b.py": "if True:\n  class Base:\n    z: int = 3\n",
    }
    source = Source(modules.get)
    assert set(source.attributes("p", "B")) == {"f", "y", "z"}
    with pytest.raises(Absent, match="no class C in p"):
        source.attributes("p", "C")


def test_a_changed_file_or_another_wheel_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / NEWEST
    folder.mkdir()
    wheel = Wheel(NEWEST, PINNED[NEWEST])
    (folder / "RECORD").write_bytes((wheel.folder / "RECORD").read_bytes())
    (folder / "vllm" / "v1").mkdir(parents=True)
    (folder / REQUEST).write_text("class Request: ...")
    copy = Wheel(NEWEST, PINNED[NEWEST], tmp_path)
    with pytest.raises(ValueError, match=r"request.py is not what the wheel's RECORD says"):
        copy.text(REQUEST)
    assert copy.text("vllm/none.py") is None
    with pytest.raises(ValueError, match="is not the one that was checked here"):
        Wheel(NEWEST, "0" * 64, tmp_path)


def test_the_newest_is_no_candidate() -> None:
    assert newest(dict.fromkeys(("0.9.2", "0.33.0", "0.34.0rc1", "0.4.0"), "")) == "0.33.0"


# The table of what is read is what our own source reads


def found() -> tuple[set[str], set[str]]:
    pairs = [derived(path.read_text()) for path in OBSERVERS]
    return set().union(*(read for read, _ in pairs)), set().union(*(asked for _, asked in pairs))


def test_the_table_of_reads_is_complete_and_has_nothing_more() -> None:
    read, asked = found()
    assert read | asked == set().union(*(read.all for read in READS))


def test_only_what_is_asked_for_with_a_fallback_may_be_absent() -> None:
    read, asked = found()
    optional = {n.rstrip("?") for row in READS for n in row.names.split() if n.endswith("?")}
    assert optional <= asked - read
    # Of two, the second may be read outright.
    assert {row[0] for one in READS for row in one.wanted if len(row) > 1} <= asked


NEW_READS = [
    ("engine.py", "request_id = request.request_id\n", "request_id = request.client_index\n"),
    ("engine.py", "len(scheduler.running)", "len(scheduler.sleeping)"),
    ("engine.py", "count += len(outputs.outputs)", "count += len(outputs.wave)"),
    ("engine.py", "output.new_token_ids)", "output.new_logprobs)"),
    ("engine.py", "stats.num_draft_tokens", "stats.num_drafts"),
    ("engine.py", "entry.req_id", "entry.block_ids"),
    ("engine.py", '"_pause_state"', '"_paused"'),
    ("frontend.py", "state.num_cached_tokens", "state.stats.first_token_ts"),
    ("frontend.py", "sequence.state.is_prefilling", "sequence.state.queue"),
    ("frontend.py", "output.token_ids", "output.text"),
    ("frontend.py", "parent.sampling_params.n ", "parent.child_requests "),
    ("worker.py", "parallel.data_parallel_rank", "parallel.node_rank"),
]


@pytest.mark.parametrize(("name", "old", "new"), NEW_READS)
def test_another_read_is_noticed(name: str, old: str, new: str) -> None:
    (path,) = [path for path in OBSERVERS if path.name == name]
    text = path.read_text()
    assert old in text
    known = set().union(*(read.all for read in READS))
    read, asked = derived(text.replace(old, new, 1))
    assert (read | asked) - known


def test_what_pytest_ran_is_taken_in(tmp_path: Path) -> None:
    file = tmp_path / "results.xml"
    case = '<testcase classname="tests.e2e.test_a" name="x">{}</testcase>'
    file.write_text(f"<testsuites>{case.format('') * 2}</testsuites>")
    assert command.results([str(file)]) == {"test_a": 2}
    file.write_text(f"<testsuites>{case.format('')}{case.format('<skipped/>')}</testsuites>")
    with pytest.raises(ValueError, match="did not pass"):
        command.results([str(file)])
