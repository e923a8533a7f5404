"""The end of a server, told from rings and records that were written by hand."""

import io
import json
import os
import shutil
import struct
import time
from pathlib import Path

import pytest

from llmobs import schema
from llmobs.agent.endings import Endings
from llmobs.agent.flight import Record
from llmobs.agent.run import Run
from llmobs.agent.vitals import Vitals
from llmobs.cli import main
from llmobs.postmortem.case import Case, open_case
from llmobs.postmortem.cause import Cause, cause_of, size
from llmobs.ring import Writer

SECOND = 1_000_000_000
WALL = 1_800_000_000 * SECOND  # so long after the monotonic clock began, in these tests
PIDS = {"api_server": 5_000_001, "engine_core": 5_000_002, "worker": 5_000_003}
API, ENGINE, WORKER = PIDS.values()
EXIT, RAISED, BROKEN = 43, 44, 45


class Server:
    """Three processes that are dead, and what they left in their rings. Seconds are since boot."""

    def __init__(self, folder: Path, name: str = "5000001-7", end: float = 100.0) -> None:
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        self.name = name
        self.rings: dict[str, Writer] = {}
        for place, (role, pid) in enumerate(PIDS.items()):
            info = {"roles": [role], "models": ["deepseek-v4"], "vllm": "0.32.0", "llmobs": "1.0"}
            info |= {"server": name, "began": 1_800_000_010.0, "probe_numbers": {"forward": 17}}
            info |= {"rank": 0} if role == "worker" else {}
            path = self.folder / f"{role}-{pid}-7.ring"
            self.rings[role] = Writer(path, 256, info)
            with path.open("r+b") as file:  # of a process that there is not
                file.seek(24)
                file.write(struct.pack("<II", pid, len(json.dumps(info))))
                file.seek(32)
                file.write(struct.pack("<Q", 7 + place))
            self.beat(role, end)

    def beat(self, role: str, seconds: float) -> None:
        cells = self.rings[role].cells
        cells[schema.PROCESS_CELL["alive_ns"]] = round(seconds * SECOND)
        cells[schema.PROCESS_CELL["alive_wall_ns"]] = round(seconds * SECOND) + WALL

    def put(self, role: str, kind: int, seconds: float, *fields: int) -> None:
        """Whom, x, y and the columns."""
        self.rings[role].put(kind, round(seconds * SECOND), *fields)

    def exits(self, parent: str, seconds: float, child: int, code: int) -> None:
        self.put(parent, EXIT, seconds, 0, 0, 0, child, code)

    def leaves(self, role: str, seconds: float) -> None:
        self.put(role, EXIT, seconds, 0, 1)

    def raises(self, role: str, seconds: float, name: bytes) -> None:
        self.rings[role].put_text(RAISED, round(seconds * SECOND), name, 17)

    def request(self, number: int, seconds: float, prompt: int, joins: bool = True) -> None:
        """One that is queued."""
        cell = 0 if prompt <= 1024 else 2
        self.put("api_server", 1, seconds, number, 1)
        columns = (number, 8, cell, number * 1000, prompt, 50)
        self.put("api_server", 2, seconds + 0.001, *columns)
        if joins:
            self.put("engine_core", 16, seconds + 0.002, number, 0, cell, number * 1000, prompt)

    def step(self, number: int, seconds: float, *started: int, waiting: int = 0) -> None:
        """A prefill of these sequences, which all yield their first token."""
        end = round(seconds * SECOND)
        start = end - SECOND // 100
        for sequence in started:
            self.put(
                *("engine_core", 17, seconds - 0.01, sequence, 1, 0),
                *(20, 0, number, sequence * 1000),
            )
        self.rings["engine_core"].put_list(19, end, [n for s in started for n in (s, 1)])
        self.put(
            *("engine_core", 21, seconds, number, 0, 1),
            *(start, start, start, len(started), 20, len(started), waiting, 0, start),
        )

    def sampled(self, *cgroups: dict[str, int], folder: Path | None = None) -> Path:
        """The agent's record, as of the rings now, with a sample a second before the end."""
        run = Run(self.folder, autopsy=True)
        run.read_dead()
        record = Record(self.name, run)
        record.look(Vitals(), None, Endings())
        record.ended = True
        content = json.loads(record.text())
        content["samples"] = [
            {
                "at": 1_800_000_100.0 - len(cgroups) + place,
                "resident": {str(pid): 3 << 30 for pid in PIDS.values()},
                "cgroups": {"/sys/fs/cgroup/pod": figures},
                "gauges": {
                    "llmobs_kv_blocks": [
                        [{"state": "used"}, 30.0 + place],
                        [{"state": "free"}, 70.0 - place],
                    ]
                },
            }
            for place, figures in enumerate(cgroups)
        ]
        content["written"] = 1_800_000_100.0
        path = (folder or self.folder) / f"{self.name}.flight.json"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(json.dumps(content))
        return path


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "runs")


def told(server: Server) -> tuple[Case, Cause, str]:
    """The case, the cause, and the page."""
    out, err = io.StringIO(), io.StringIO()
    code = main(["postmortem", str(server.folder)], out, err)
    assert err.getvalue() == ""
    case = open_case(server.folder)
    cause = cause_of(case)
    assert code == (0 if cause.good else 1)
    return case, cause, " ".join(out.getvalue().split())


def in_flight(case: Case) -> int:
    return sum(n for phases in case.scene["in_flight"].values() for n in phases.values())


def engine_killed(server: Server, code: int = -9) -> None:
    """And the server falls."""
    server.beat("engine_core", 99.2)
    server.exits("api_server", 99.5, ENGINE, code)
    server.put("api_server", BROKEN, 99.6)
    server.leaves("worker", 99.9)
    server.leaves("api_server", 100.2)


# Causes


def test_one_process_was_killed_and_its_parent_saw_it(server: Server) -> None:
    server.request(1, 90.0, 20)
    server.request(2, 95.0, 5000)
    server.step(7, 99.1, 1, waiting=1)
    engine_killed(server)
    # The front end tells its clients, after it knew:
    server.put("api_server", 4, 99.7, 1, 3, 0, 1000, 1)
    server.put("api_server", 5, 99.7, 1, 3, 200, 0, 1, 90 * SECOND)
    case, cause, page = told(server)
    assert (cause.kind, cause.certain, cause.good) == ("killed", False, False)
    assert "Likely cause: EngineCore (pid 5000002) was ended by signal 9 (SIGKILL)" in page
    assert "API server (pid 5000001), Worker (pid 5000003) outlived it" in page
    assert in_flight(case) == 2
    assert case.scene["in_flight"] == {"0-1k": {"decode": 1}, "4k-32k": {"queue": 1}}
    assert case.scene["at"] == 1_800_000_099.5
    assert case.scene["waiting"] == {
        "sequences": 1,
        "prompt_tokens": 5000,
        "reason": "max_num_seqs",
    }
    ages = [r["age"] for r in case.scene["requests"]]
    assert ages == [9.5, 4.5]
    assert [r["output_tokens"] for r in case.scene["requests"]] == [1, 0]
    assert case.scene["steps"][-1]["at"] == 1_800_000_099.1
    exits = {p["pid"]: p["exit"] for p in case.scene["processes"]}
    assert exits == {API: None, ENGINE: -9, WORKER: None}
    assert "There is no flight record" in page


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-11, "signal 11 (SIGSEGV): native code crashed"),
        (-6, "signal 6 (SIGABRT): native code crashed"),
        (-15, "signal 15 (SIGTERM)"),
        (-63, "signal 63"),
    ],
)
def test_other_signals(server: Server, code: int, words: str) -> None:
    engine_killed(server, code)
    _, cause, _ = told(server)
    assert cause.kind == "signal"
    assert cause.what == f"EngineCore (pid 5000002) was ended by {words}"


def test_the_one_that_ended_first_is_the_cause(server: Server) -> None:
    """The engine core fails by its worker's death, and ends with a code of its own."""
    server.exits("engine_core", 98.0, WORKER, -9)
    server.exits("api_server", 99.0, ENGINE, 1)
    server.put("api_server", BROKEN, 99.0)
    _, cause, _ = told(server)
    assert (cause.kind, cause.what[:20]) == ("killed", "Worker (pid 5000003)")
    assert "saw EngineCore (pid 5000002) end by exit code 1 at" in cause.evidence[-1]


def test_killed_for_memory(server: Server) -> None:
    engine_killed(server)
    server.sampled(
        {"used": 800, "limit": 1000, "oom_kills": 4},
        {"used": 990, "limit": 1000, "oom_kills": 4},
        {"used": 100, "limit": 1000, "oom_kills": 5},
    )
    _, cause, page = told(server)
    assert cause.kind == "out_of_memory_kill"
    assert cause.what == (
        "the kernel killed EngineCore (pid 5000002) because the cgroup's memory had run out"
    )
    assert cause.evidence[0] == "/sys/fs/cgroup/pod: oom_kill went from 4 to 5"
    assert "KV used" in page
    assert "32%" in page
    assert "resident GiB" in page


def test_a_full_cgroup_is_said_to_be_maybe_the_reason(server: Server) -> None:
    """Whoever counts the kills was killed as well."""
    engine_killed(server)
    server.sampled({"used": 990, "limit": 1000, "oom_kills": 4})
    _, cause, _ = told(server)
    assert cause.kind == "out_of_memory_kill"
    assert "maybe by the kernel" in cause.what
    assert "/sys/fs/cgroup/pod: 99% of 1,000 B in use at the last look" in cause.evidence


def test_a_kill_in_the_cgroup_is_no_reason_for_a_good_end(server: Server) -> None:
    server.leaves("api_server", 100.0)
    server.sampled({"used": 1, "oom_kills": 0}, {"used": 1, "oom_kills": 1})
    assert told(server)[1].kind == "shut_down"


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        (b"torch.OutOfMemoryError", "device_out_of_memory", "the GPU's memory ran out in Worker"),
        (b"torch.cuda.OutOfMemoryError", "device_out_of_memory", "the GPU's memory ran out in"),
        (b"MemoryError", "out_of_memory", "there was no memory left in Worker (pid 5000003)"),
        (b"torch.AcceleratorError", "exception", "torch.AcceleratorError in Worker (pid 5000003)"),
    ],
)
def test_exceptions_by_their_class(server: Server, name: bytes, kind: str, what: str) -> None:
    server.request(1, 90.0, 20)
    server.raises("worker", 98.0, name)
    server.raises("engine_core", 98.5, b"RuntimeError")
    engine_killed(server, 1)
    case, cause, page = told(server)
    assert cause.kind == kind
    assert what in cause.what
    assert f"raised {name.decode()} at" in page
    assert case.scene["at"] == 1_800_000_098.0
    assert in_flight(case) == 1


def test_an_exit_code_alone(server: Server) -> None:
    engine_killed(server, 3)
    _, cause, _ = told(server)
    assert cause.kind == "exit_code"
    assert "ended by itself with exit code 3; why is in the server's log" in cause.what


@pytest.mark.parametrize("code", [0, -15, -9])
def test_a_good_end(server: Server, code: int) -> None:
    """Children that take too long are killed by the server itself."""
    server.exits("engine_core", 99.0, WORKER, code)
    server.exits("api_server", 99.5, ENGINE, code)
    server.leaves("api_server", 100.0)
    _, cause, page = told(server)
    assert (cause.kind, cause.certain) == ("shut_down", True)
    assert "Cause: it was shut down in good order" in page


def test_all_at_once(server: Server) -> None:
    server.beat("engine_core", 99.1)
    server.request(1, 99.9, 20, joins=False)
    case, cause, _ = told(server)
    assert cause.kind == "killed_together"
    assert cause.evidence[0].startswith("their last signs of life lie within 0.9 s")
    assert len(cause.evidence) == 4
    assert in_flight(case) == 1


def test_a_process_that_had_stood_still(server: Server) -> None:
    server.beat("engine_core", 70.0)
    _, cause, _ = told(server)
    assert cause.kind == "frozen"
    assert cause.evidence[0] == (
        "EngineCore (pid 5000002) gave no sign of life for 30 s before the others ended"
    )


def test_one_that_stood_still_before_it_was_killed(server: Server) -> None:
    engine_killed(server)
    server.beat("engine_core", 70.0)
    cause = told(server)[1]
    assert cause.kind == "killed"
    assert cause.evidence[-1] == (
        "EngineCore (pid 5000002) gave no sign of life for 30 s before it ended"
    )


def test_steps_that_stood_still_while_the_process_lived(server: Server) -> None:
    server.request(1, 50.0, 20)
    server.step(7, 60.0, 1)
    cause = told(server)[1]
    assert cause.kind == "frozen"
    assert cause.evidence[0] == "1 requests were running, and no step ended for 40 s"


def test_the_front_end_went_first(server: Server) -> None:
    server.beat("api_server", 95.0)
    server.leaves("engine_core", 101.0)
    cause = told(server)[1]
    assert cause.kind == "front_end_ended"
    assert "API server (pid 5000001) ended first, without a good-bye" in cause.what


def seen_by_the_agent(path: Path, **ends: tuple[int, float]) -> None:
    record = json.loads(path.read_text())
    record["ends"] = {str(PIDS[role]): [code, at] for role, (code, at) in ends.items()}
    path.write_text(json.dumps(record))


def test_the_front_end_was_killed_and_the_agent_saw_it(server: Server) -> None:
    server.beat("api_server", 99.0)
    server.request(1, 90.0, 20)
    server.step(7, 99.1, 1)
    server.step(8, 99.6, 1)  # nobody is there any more to take what comes out
    path = server.sampled({"used": 5})
    at = 1_800_000_099.4
    seen_by_the_agent(path, api_server=(-9, at), engine_core=(1, at), worker=(0, at))
    case, cause, page = told(server)
    assert case.scene["at"] == at
    assert case.scene["steps"][-1]["at"] == 1_800_000_099.1
    assert cause.kind == "killed"
    assert cause.what.startswith("API server (pid 5000001) was ended by signal 9 (SIGKILL)")
    assert cause.evidence[0].startswith("the agent saw API server (pid 5000001) end by signal 9")
    assert "API server 5000001" in page
    assert "signal 9 (SIGKILL), seen by the agent at" in page


def test_all_were_killed_and_the_agent_saw_it(server: Server) -> None:
    path = server.sampled({"used": 5})
    seen_by_the_agent(path, **dict.fromkeys(PIDS, (-9, 1800000100.2)))
    _, cause, _ = told(server)
    assert (cause.kind, len(cause.evidence)) == ("killed_together", 3)
    assert "by SIGKILL" in cause.what


def test_what_the_parent_saw_goes_before_what_the_agent_saw(server: Server) -> None:
    engine_killed(server)
    path = server.sampled({"used": 5})
    seen_by_the_agent(path, api_server=(0, 1_800_000_101.0), engine_core=(-9, 1_800_000_099.7))
    case, cause, _ = told(server)
    exits = {p["pid"]: (p["exit"], p["exit_seen_by"]) for p in case.scene["processes"]}
    assert exits == {API: (0, "agent"), ENGINE: (-9, API), WORKER: (None, None)}
    assert cause.kind == "killed"


def test_where_the_evidence_is_thin_it_says_unknown(server: Server) -> None:
    server.beat("worker", 95.0)
    _, cause, page = told(server)
    assert cause.kind == "unknown"
    assert "Cause: unknown: nothing that is left says why" in page


def test_a_server_that_runs(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for ring in server.folder.iterdir():
        ring.unlink()
    info = {"roles": ["api_server"], "models": ["m"], "server": server.name, "began": time.time()}
    Writer(server.folder / "api_server-1-1.ring", 16, info)
    assert told(server)[1].kind == "alive"


def test_an_engine_that_a_script_lost_long_before_is_not_the_cause(server: Server) -> None:
    for role in PIDS:
        server.beat(role, 500.0)
    server.exits("api_server", 99.0, 5_000_009, 1)
    server.request(1, 499.0, 20)
    assert in_flight(told(server)[0]) == 1


# What is read


def test_without_the_rings_the_record_tells_the_same(server: Server, tmp_path: Path) -> None:
    server.request(1, 90.0, 20)
    server.request(2, 95.0, 5000)
    server.step(7, 99.1, 1, waiting=1)
    engine_killed(server)
    server.sampled({"used": 5, "limit": 1000, "oom_kills": 0}, folder=tmp_path / "volume")
    by_rings = open_case(tmp_path / "volume")
    assert by_rings.read[0] == f"the rings in {server.folder}"
    shutil.rmtree(server.folder)
    by_record = open_case(tmp_path / "volume")
    assert by_record.read == (f"the flight record {tmp_path}/volume/5000001-7.flight.json",)
    scene = {k: v for k, v in by_rings.scene.items() if k != "gauges"}
    assert {k: v for k, v in by_record.scene.items() if k != "gauges"} == scene
    assert cause_of(by_record) == cause_of(by_rings)


def test_a_record_that_ends_while_all_are_alive_is_of_a_whole_that_was_killed(
    server: Server, tmp_path: Path
) -> None:
    """The container ended, its memory and the agent with it."""
    server.request(1, 90.0, 20)
    path = server.sampled({"used": 990, "limit": 1000}, folder=tmp_path / "volume")
    shutil.rmtree(server.folder)
    record = json.loads(path.read_text())
    for process in record["scene"]["processes"]:
        process["alive"] = True
    path.write_text(json.dumps(record))
    case = open_case(path.parent)
    cause = cause_of(case)
    assert cause.kind == "killed_together"
    assert cause.what.endswith("maybe because the cgroup's memory had run out")
    assert in_flight(case) == 1
    record["written"] = time.time()
    path.write_text(json.dumps(record))
    assert cause_of(open_case(path.parent)).kind == "killed_together"  # here they do not run
    record["host"] = "another"
    path.write_text(json.dumps(record))
    assert cause_of(open_case(path.parent)).kind == "alive"


def test_what_a_ring_has_overwritten_the_record_still_knows(server: Server) -> None:
    server.request(1, 50.0, 20)
    server.step(7, 60.0, 1)
    path = server.sampled({"used": 5})
    for number in range(2, 300):  # rings of 256
        server.put("api_server", 5, 70.0, number, 0, 200, 0, 5, 69 * SECOND)
        server.put("engine_core", 22, 70.0, number)
    case = open_case(server.folder)
    assert in_flight(case) == 1
    path.unlink()
    assert in_flight(open_case(server.folder)) == 0


def test_of_several_the_newest_is_told_and_named(tmp_path: Path) -> None:
    Server(tmp_path, "5-1", end=50.0)
    newest = Server(tmp_path, "4-1", end=90.0)
    Server(tmp_path, "6-1", end=70.0)
    (tmp_path / "file_sd").mkdir()
    case = open_case(tmp_path)
    assert (case.server, case.others) == ("4-1", ("5-1", "6-1"))
    out = io.StringIO()
    main(["postmortem", str(tmp_path)], out)
    assert "server 4-1" in out.getvalue()
    assert "older ones there: 5-1, 6-1" in out.getvalue()
    shutil.rmtree(newest.folder)
    assert open_case(tmp_path).server == "6-1"


def test_json(server: Server) -> None:
    server.request(1, 90.0, 20)
    engine_killed(server)
    server.sampled({"used": 5, "limit": 10})
    out = io.StringIO()
    assert main(["postmortem", "--json", str(server.folder)], out) == 1
    content = json.loads(out.getvalue())
    assert content["cause"]["kind"] == "killed"
    assert content["server"] == "5000001-7"
    assert content["scene"]["requests"][0]["prompt_tokens"] == 20
    assert len(content["scene"]["trend"]) == 60
    assert content["samples"][0]["resident"]["5000002"] == 3 << 30


BAD = {
    "missing": "does not exist",
    "file": "is no flight record",
    "empty": "holds neither rings nor flight records",
    "nonsense": "holds neither rings nor flight records",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "nonsense").mkdir()
    (tmp_path / "nonsense" / "a.ring").write_bytes(os.urandom(100_000))
    (tmp_path / "nonsense" / "a.flight.json").write_text('{"version": 1, "scene": 3}')
    out, err = io.StringIO(), io.StringIO()
    assert main(["postmortem", str(tmp_path / name)], out, err) == 2
    (line,) = err.getvalue().splitlines()
    assert line.startswith(f"llmobs postmortem: {tmp_path / name} {BAD[name]}; accepted is")
    assert out.getvalue() == ""


def test_a_record_may_be_named_itself(server: Server, tmp_path: Path) -> None:
    engine_killed(server)
    path = server.sampled({"used": 5}, folder=tmp_path / "volume")
    assert open_case(path).read == (f"the rings in {server.folder}", f"the flight record {path}")
    shutil.rmtree(server.folder)
    assert open_case(path).read == (f"the flight record {path}",)


@pytest.mark.parametrize(
    "damage",
    [
        {"scene": {"at": 3}},
        {"scene": {"at": "x", "processes": [{}], "trend": []}},
        {"samples": [{}]},
        {"samples": [3]},
    ],
)
def test_a_damaged_record_is_one_line(server: Server, tmp_path: Path, damage: dict) -> None:
    path = server.sampled({"used": 5}, folder=tmp_path / "volume")
    shutil.rmtree(server.folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    out, err = io.StringIO(), io.StringIO()
    assert main(["postmortem", str(path)], out, err) == 2
    (line,) = err.getvalue().splitlines()
    assert line.startswith(f"llmobs postmortem: {path}: its flight record is damaged (")
    assert out.getvalue() == ""


def test_records_that_name_each_other_are_no_loop(server: Server, tmp_path: Path) -> None:
    engine_killed(server)
    path = server.sampled({"used": 5}, folder=tmp_path / "a")
    record = json.loads(path.read_text())
    for mine, other in (("a", "b"), ("b", "a")):
        (tmp_path / mine).mkdir(exist_ok=True)
        text = json.dumps(record | {"run_folder": str(tmp_path / other)})
        (tmp_path / mine / path.name).write_text(text)
    assert open_case(tmp_path / "a").server == server.name


@pytest.mark.parametrize("role", ["api_server", "engine_core", "worker"])
def test_a_damaged_ring_costs_its_own_story_only(server: Server, role: str) -> None:
    engine_killed(server)
    with next(server.folder.glob(f"{role}*")).open("r+b") as file:
        file.seek(70_000)
        file.write(os.urandom(10_000))
    case, _, _ = told(server)
    assert len(case.scene["processes"]) == 3
    with next(server.folder.glob(f"{role}*")).open("r+b") as file:
        file.truncate(66_000)
    assert len(told(server)[0].scene["processes"]) == 2


def test_no_help_without_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["postmortem", "--help"])
    assert caught.value.code == 0
    assert "llmobs postmortem /dev/shm/llmobs-0 " in capsys.readouterr().out


def test_bytes_for_a_person() -> None:
    assert [size(n) for n in (0, 999, 2048, 300 << 20, 5 << 30, 3000 << 30)] == [
        *("0 B", "999 B", "2.0 KiB", "300 MiB", "5.0 GiB", "3,000 GiB")
    ]
