"""What the probes cost per engine step in a real server, measured inside its processes (inside.py).

Real steps find the caches cold, which the stand-ins of probes.py do not. All streams begin together
and have the same length, so nearly all steps are steady decode.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.inside import OUT
from demo.client import completion, open_session
from demo.model import make_model, prompt_ids
from demo.vllm_server import MODULE, ROOT, VllmServer

SPECULATE = (
    '--speculative-config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,'
    '"prompt_lookup_min":2}'
)
PROCESSES = {"schedule": "engine core", "forward": "worker", "chunk": "front end"}
"""A probe that tells in which process the others of its file are."""


async def load(url: str, streams: int, tokens: int) -> None:
    async with open_session() as session:
        await asyncio.gather(
            *(
                completion(session, url, prompt_ids(50, n), max_tokens=tokens, stream=True)
                for n in range(streams)
            )
        )


def told(folder: Path) -> dict[tuple[str, str], tuple[int, float]]:
    """Calls and median own nanoseconds, by process and probe."""
    found = {}
    for file in folder.glob("*.json"):
        timers = json.loads(file.read_text())
        process = next((p for probe, p in PROCESSES.items() if probe in timers), "front end")
        found |= {(process, probe): tuple(timer) for probe, timer in timers.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="without speculation")
    options = parser.parse_args()
    print("| running | speculating | steps | engine core | worker | front end | together |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for speculate in (False,) if options.quick else (False, True):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "site").mkdir()
            (folder / "out").mkdir()
            (folder / "out" / "window").write_text("")
            (folder / "site" / "sitecustomize.py").write_text(
                "from benchmarks import inside\ninside.install()\n"
            )
            paths = [str(folder / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
            env = {
                "LLMOBS_RUN_DIR": str(folder / "runs"),
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                OUT: str(folder / "out"),
            }
            args = ["--max-num-seqs=256", *([SPECULATE] if speculate else [])]
            model = make_model(folder / "model")
            with VllmServer(model, folder / "log", args, env=env, entry=MODULE) as server:
                asyncio.run(load(server.url, 8, 50))
                for streams in (8, 64, 256):
                    (folder / "out" / "window").write_text(str(streams))
                    time.sleep(1.2)
                    asyncio.run(load(server.url, streams, options.tokens))
                    time.sleep(1.2)
                    timers = told(folder / "out")
                    steps, _ = timers["engine core", "update"]
                    own: Counter[str] = Counter()
                    for (process, probe), (calls, median) in sorted(timers.items()):
                        own[process] += calls * median / steps / 1e3
                        about = f"{process}: {probe} {median / 1e3:.2f} µs x {calls}"
                        print(about, file=sys.stderr)
                    figures = [own[process] for process in PROCESSES.values()]
                    cells = " | ".join(f"{figure:.1f}" for figure in (*figures, sum(figures)))
                    print(
                        f"| {streams} | {'yes' if speculate else 'no'} | {steps} | {cells} |",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
