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
PROCESSES = {"schedule": "engine core", "forward": "worker", "http_edge": "front end"}
"""A probe that tells in which process the others of its file are."""


async def load(url: str, streams: int, tokens: int) -> None:
    async with open_session() as session:
        await asyncio.gather(
            *(
                completion(session, url, prompt_ids(50, n), max_tokens=tokens, stream=True)
                for n in range(streams)
            )
        )


class Times:
    """Own nanoseconds and calls so far, by process and probe."""

    def __init__(self, folder: Path) -> None:
        self.own: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        for file in folder.glob("*.json"):
            told = json.loads(file.read_text())
            process = next((p for probe, p in PROCESSES.items() if probe in told["timers"]), "")
            for probe, (calls, own) in told["timers"].items():
                self.own[process, probe] += int(own - calls * told["overhead"])
                self.calls[process, probe] += calls


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
                    time.sleep(1.2)
                    before = Times(folder / "out")
                    asyncio.run(load(server.url, streams, options.tokens))
                    time.sleep(1.2)
                    after = Times(folder / "out")
                    steps = (after.calls - before.calls)["engine core", "update"]
                    own: Counter[str] = Counter()
                    for (process, probe), nanoseconds in after.own.items():
                        own[process] += nanoseconds - before.own[process, probe]
                    figures = [own[process] / steps / 1e3 for process in PROCESSES.values()]
                    cells = " | ".join(f"{figure:.1f}" for figure in (*figures, sum(figures)))
                    for (process, probe), nanoseconds in sorted(after.own.items()):
                        calls = (after.calls - before.calls)[process, probe]
                        if calls:
                            each = (nanoseconds - before.own[process, probe]) / calls / 1e3
                            print(f"{process}: {probe} {each:.2f} µs x {calls}", file=sys.stderr)
                    print(
                        f"| {streams} | {'yes' if speculate else 'no'} | {steps} | {cells} |",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
