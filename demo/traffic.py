"""Mixed traffic that makes short chats slow: a burst of long documents in the middle third."""

import argparse
import asyncio
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

if not __package__:  # run as a file: `python demo/traffic.py`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.client import MODEL, Outcome, chat, completion, open_session
from demo.model import CHAT_OVERHEAD, prompt_ids, prompt_text


@dataclass(frozen=True)
class Class:
    """One class of requests: lengths in tokens, both ends included."""

    name: str
    prompt: tuple[int, int]
    output: tuple[int, int]
    share: float  # of the arrivals outside the burst


CHAT = Class("chat", (50, 800), (16, 64), 0.9)
MID = Class("mid", (1025, 4096), (16, 64), 0.1)
DOCUMENT = Class("document", (8192, 24000), (16, 32), 0.0)


@dataclass(frozen=True)
class Arrival:
    """One request to send: `at` seconds after the start."""

    at: float
    kind: Class
    prompt: int
    output: int
    seed: int


def plan(seconds: float, rate: float, document_rate: float, seed: int) -> list[Arrival]:
    """Poisson arrivals: chats and mid prompts at `rate` per second all the time, and documents at
    `document_rate` per second in the middle third. The same arguments give the same plan."""
    rng = random.Random(seed)
    due = [
        (at, rng.choices((CHAT, MID), (CHAT.share, MID.share))[0])
        for at in _poisson(rng, rate, 0.0, seconds)
    ]
    due += [(at, DOCUMENT) for at in _poisson(rng, document_rate, seconds / 3, seconds * 2 / 3)]
    return [
        Arrival(at, kind, rng.randint(*kind.prompt), rng.randint(*kind.output), seed * 10_000 + i)
        for i, (at, kind) in enumerate(sorted(due, key=lambda pair: pair[0]))
    ]


def _poisson(rng: random.Random, rate: float, start: float, end: float) -> Iterator[float]:
    at = start
    while rate > 0 and (at := at + rng.expovariate(rate)) < end:
        yield at


async def run(
    url: str,
    model: str = MODEL,
    seconds: float = 40.0,
    rate: float = 4.0,
    document_rate: float = 1.0,
    seed: int = 1,
    quiet: bool = False,
) -> list[tuple[str, Outcome]]:
    """Send the planned traffic and wait for all answers; class name and outcome of each, in order
    of arrival.

    Open loop: a request leaves when it is due, however slow the answers are, as users do. Raises
    ValueError where `url` is not of this machine.
    """
    if not _is_loopback(url):
        raise ValueError(f"{url}: this traffic is for a server on the loopback interface only")
    arrivals = plan(seconds, rate, document_rate, seed)
    done: list[Outcome] = []
    start = time.monotonic()
    async with open_session() as session, asyncio.TaskGroup() as group:
        tasks = []
        for arrival in arrivals:
            await asyncio.sleep(start + arrival.at - time.monotonic())
            task = group.create_task(_send(session, url, model, arrival))
            task.add_done_callback(lambda task: done.append(task.result()))
            tasks.append(task)
            if not quiet:
                _progress(start, seconds, len(tasks), done)
        while len(done) < len(tasks):
            await asyncio.sleep(0.2)
            if not quiet:
                _progress(start, seconds, len(tasks), done)
    if not quiet and sys.stderr.isatty():
        print(file=sys.stderr)
    return [
        (arrival.kind.name, task.result()) for arrival, task in zip(arrivals, tasks, strict=True)
    ]


async def _send(session: aiohttp.ClientSession, url: str, model: str, arrival: Arrival) -> Outcome:
    if arrival.kind is CHAT:
        text = prompt_text(arrival.prompt - CHAT_OVERHEAD, arrival.seed)
        return await chat(session, url, text, max_tokens=arrival.output, stream=True, model=model)
    ids = prompt_ids(arrival.prompt, arrival.seed)
    return await completion(session, url, ids, max_tokens=arrival.output, stream=True, model=model)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _progress(start: float, seconds: float, sent: int, done: list[Outcome]) -> None:
    if not sys.stderr.isatty():
        return
    failed = sum(not outcome.ok for outcome in done)
    line = f"{time.monotonic() - start:5.0f}/{seconds:.0f} s  sent {sent}  done {len(done)}"
    print(f"\r{line}  failed {failed} ", end="", file=sys.stderr, flush=True)


def summary(results: list[tuple[str, Outcome]], seconds: float) -> Iterator[str]:
    """One line per class and third of the run: count, first-token and longest-gap P50 and P99."""
    if not results:
        return
    start = min(outcome.started for _, outcome in results)
    for kind in (CHAT, MID, DOCUMENT):
        for third in range(3):
            chosen = [
                outcome
                for name, outcome in results
                if name == kind.name
                and min(2, int((outcome.started - start) / seconds * 3)) == third
            ]
            if chosen:
                ttft = _quantiles([o.ttft for o in chosen if o.ttft is not None])
                gap = _quantiles([o.longest_gap for o in chosen if o.longest_gap is not None])
                yield (
                    f"{kind.name:8}  third {third + 1}  {len(chosen):4} requests  "
                    f"first token {ttft}  longest gap {gap}"
                )


def _quantiles(values: list[float]) -> str:
    """P50 and P99 by nearest rank, in milliseconds."""
    if not values:
        return "none"
    ordered = sorted(values)
    p50, p99 = (ordered[math.ceil(q * len(ordered)) - 1] * 1000 for q in (0.5, 0.99))
    return f"P50 {p50:.0f} P99 {p99:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default=MODEL, help="served model name")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rate", type=float, default=4.0, help="chats and mid prompts per second")
    parser.add_argument(
        "--document-rate", type=float, default=1.0, help="documents per second in the middle third"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    results = asyncio.run(
        run(args.url, args.model, args.seconds, args.rate, args.document_rate, args.seed)
    )
    for line in summary(results, args.seconds):
        print(line)
    statuses = Counter(outcome.status for _, outcome in results)
    print("statuses", ", ".join(f"{status}: {n}" for status, n in sorted(statuses.items())))


if __name__ == "__main__":
    main()
