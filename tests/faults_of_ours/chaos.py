"""Break llmobs beneath real servers, a thousand times: `python -m tests.faults_of_ours.chaos`.

Needs root, for a disk and a user of its own. Figures add up over the runs in `.chaos/`.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.faults_of_ours.bench import Bench, Load, known, open_folder
from tests.faults_of_ours.faults import FAULTS, POINTS, Fault
from tests.faults_of_ours.lives import LIVES
from tests.faults_of_ours.results import FOLDER, HEADER, Result, forget, load, rows, save, write

BATCH = 40
ENVIRONMENTS = {
    "plain": {},
    "nobody": {"nobody": True, "disk": "40m", "clock": True},
}
INTRO = """Made by `make chaos` (seeds {seeds}; vLLM {vllm}, {cpus} CPUs): each fault is injected
into a real server while it answers requests of which the client knows the counts.

- *Failed requests*: those that the fault made fail. Where a process of the server is killed, those
  under way are that fault's own and not among them.
- *Counters exact*: afterwards the totals in the rings are what the client knows, to the request and
  the token, and the agent's page says the same. A probe that raises counts nothing: its failures
  are counted one by one, and all is exact again for what comes after it. Of a server that was
  killed: what it had served; what was under way is received and ended at most once.
- *Orphans*: agents left {end:.0f} s after the server.
- *Server's end*: from the signal to the end of its last process; `never`: not within
  {waited:.0f} s. The rows `llmobs off` say what vLLM does by itself."""


def may(fault: Fault, bench: Bench) -> bool:
    has = {
        "": True,
        "disk": bool(bench.disk),
        "clock": bench.clock is not None,
        "nobody": bench.nobody,
        "ours": not bench.nobody,
    }
    return has[fault.needs]


def inject(bench: Bench, fault: Fault) -> Result:
    """One fault under load; whether the totals are exact after it, without any agent."""
    result = Result(fault.name)
    name = fault.name.split("`")[1] if fault.name.startswith("probe") else ""
    point = POINTS.get(name, 0)
    raised, told = bench.board.raised(point), bench.totals()
    more = getattr(bench, fault.traffic)() if fault.traffic else []
    with Load([*bench.usual(), *(more if isinstance(more, list) else [more])]) as under:
        time.sleep(bench.random.uniform(0, 0.04))
        undo = fault.inject(bench)
    undo()
    result.failed = under.failed
    if fault.exact:
        bench.expected += known(under.calls)
    else:
        with Load([bench.completion()]) as next_one:  # ends what the fault left open
            pass
        result.failed += next_one.failed
        bench.rebase()
        raised = bench.board.raised(point) - raised
        counted = bench.totals()[f"guard {name}"] - told[f"guard {name}"]
        if counted != raised:
            result.inexact = f"{raised} failures, {counted} counted"
        with Load(bench.usual()) as after:
            pass
        result.failed += after.failed
        bench.expected += known(after.calls)
    if difference := bench.settle():
        result.inexact += str(dict(difference))
        bench.rebase()
    return result


def batches(bench: Bench, injections: int) -> Iterator[list[Fault]]:
    """Random faults; in each batch those that end the agent come last, since then the page is
    waited for."""
    possible = [fault for fault in FAULTS if may(fault, bench)]
    for start in range(0, injections, BATCH):
        chosen = bench.random.choices(possible, k=min(BATCH, injections - start))
        yield sorted(chosen, key=lambda fault: fault.ends_agent)


def torment(bench: Bench, injections: int, seconds: float) -> Iterator[Result]:
    """Faults into one server that runs on; the page is looked at after each batch."""
    end = time.monotonic() + seconds
    for batch in batches(bench, injections):
        results = []
        for fault in batch:
            results.append(inject(bench, fault))
            if not results[-1].good:
                print(f"  {results[-1]}", flush=True)
        if said := bench.page_agrees():
            print(f"  the page after {[fault.name for fault in batch]}: {said}", flush=True)
            for result in results:
                result.inexact = result.inexact or f"the page: {said}"
        yield from results
        if time.monotonic() > end:
            return


def long_lived(seed: int, injections: int, kind: str, seconds: float) -> Iterator[Result]:
    with open_folder() as folder, Bench(folder / kind, **ENVIRONMENTS[kind]) as bench:
        bench.random = random.Random(seed)
        print(f"{kind}: up in {bench.server.startup_s:.0f} s", flush=True)
        yield from torment(bench, injections, seconds)
        server_s, agent_s, orphans = bench.end()
        yield Result(
            f"none more: server ended (SIGTERM) after all that, {kind}",
            0,
            "",
            orphans,
            server_s,
            agent_s,
        )


def lives(names: list[str], seconds: float) -> Iterator[Result]:
    """Faults that take a server of their own; none is begun after so many seconds."""
    end = time.monotonic() + seconds
    for name in names:
        if time.monotonic() > end:
            return
        with open_folder() as folder:
            yield from LIVES[name](name, folder)


def chosen(options: argparse.Namespace) -> list[str]:
    """The names of these: those named, or all; of these every n-th, and only those not yet run."""
    names = options.life or (list(LIVES) if options.lives else [])
    first, every = map(int, options.part.split("/"))
    done = {result.fault for result in load()} if options.missing else set()
    return [name for name in names[first::every] if name not in done]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--injections", type=int, default=1000, help="into servers that run on")
    parser.add_argument("--lives", action="store_true", help="also servers for one fault each")
    parser.add_argument("--life", action="append", default=[], help="one of these by its name")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="each N-th of these from I on")
    parser.add_argument("--missing", action="store_true", help="those of these not yet run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bench", choices=ENVIRONMENTS, action="append")
    parser.add_argument("--seconds", type=float, default=3600, help="no new server or batch after")
    parser.add_argument("--fresh", action="store_true", help="forget the runs before")
    options = parser.parse_args()
    if options.fresh:
        forget()
    results: list[Result] = []
    began = time.monotonic()
    kinds = options.bench or list(ENVIRONMENTS)
    shares = [options.injections // len(kinds)] * len(kinds)
    shares[0] += options.injections - sum(shares)

    def all_of_them() -> Iterator[Result]:
        for kind, share in zip(kinds, shares, strict=True):
            if share:
                yield from long_lived(options.seed, share, kind, options.seconds)
        yield from lives(chosen(options), options.seconds)

    try:
        for result in all_of_them():
            results.append(result)
            print(
                f"{time.monotonic() - began:6.0f} s {len(results):5} {result.fault}: "
                + ("good" if result.good else f"BAD {result}"),
                flush=True,
            )
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        save(results)
    report(options.seed)
    bad = Counter(result.fault for result in results if not result.good)
    took = time.monotonic() - began
    print(f"\n{len(results)} injections in {took:.0f} s; bad: {dict(bad)}")
    return int(bool(bad))


def report(seed: int) -> None:
    """The table of all runs, here and in docs/reliability.md."""
    import os

    import vllm

    from tests.faults_of_ours.bench import END_S
    from tests.faults_of_ours.results import WAITED_S

    table = rows(load(), [*(fault.name for fault in FAULTS), *LIVES])
    print("\n" + "\n".join(" | ".join(map(str, row)) for row in [HEADER, *table]))
    seeds = FOLDER / "seeds"
    known_seeds = sorted({*(seeds.read_text().split() if seeds.exists() else []), str(seed)})
    seeds.write_text(" ".join(known_seeds))
    write(
        table,
        INTRO.format(
            seeds=", ".join(known_seeds),
            vllm=vllm.__version__,
            cpus=os.cpu_count(),
            end=END_S,
            waited=WAITED_S,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
