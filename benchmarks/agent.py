"""What the agent costs a busy server, and how fast its page answers meanwhile.

One server, one load again and again, with the agent running and stopped (SIGSTOP) in turn: the
ratio of the times is the agent's cost. While it runs, its page is scraped once a second.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from demo.client import completion, open_session
from demo.model import make_model, prompt_ids
from demo.vllm_server import MODULE, VllmServer


async def load(url: str, streams: int, tokens: int, seed: int) -> None:
    """So many streams of so many tokens at once."""
    async with open_session() as session:
        await asyncio.gather(
            *(
                completion(session, url, prompt_ids(50, seed + n), max_tokens=tokens, stream=True)
                for n in range(streams)
            )
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {"LLMOBS_RUN_DIR": str(folder / "runs")}
        with VllmServer(
            make_model(folder / "model"), folder / "log", env=env, entry=MODULE
        ) as server:
            time.sleep(2)
            (state,) = (json.loads(f.read_text()) for f in folder.glob("runs/*/agent.json"))
            agent, page = state["pid"], state["page"]
            scrapes: list[float] = []
            pause = threading.Event()
            pause.set()

            def scrape() -> None:
                while True:
                    time.sleep(1)
                    if not pause.is_set():
                        began = time.perf_counter()
                        urllib.request.urlopen(f"{page}/metrics", timeout=60).read()
                        scrapes.append(time.perf_counter() - began)

            threading.Thread(target=scrape, daemon=True).start()
            asyncio.run(load(server.url, options.streams, 200, 1))
            ratios = []
            for pair in range(options.pairs):
                times = {}
                for stopped in (pair % 2 == 0, pair % 2 == 1):
                    os.kill(agent, signal.SIGSTOP if stopped else signal.SIGCONT)
                    time.sleep(0.5)
                    began = time.perf_counter()
                    asyncio.run(load(server.url, options.streams, options.tokens, pair * 100))
                    times[stopped] = time.perf_counter() - began
                os.kill(agent, signal.SIGCONT)
                ratios.append(times[False] / times[True])
                print(f"pair {pair + 1}: {times[False]:.2f} s / {times[True]:.2f} s", flush=True)
            pause.clear()
            for seed in range(3):
                asyncio.run(load(server.url, options.streams, 2 * options.tokens, seed * 7))
            pause.set()
    ratios.sort()
    print(f"| agent running ÷ stopped, median of {options.pairs} pairs | lowest | highest |")
    print("| --- | --- | --- |")
    print(f"| {statistics.median(ratios):.3f} | {ratios[0]:.3f} | {ratios[-1]:.3f} |")
    scrapes.sort()
    print("| scrapes under load | median ms | highest ms |\n| --- | --- | --- |")
    print(f"| {len(scrapes)} | {statistics.median(scrapes) * 1e3:.0f} | {scrapes[-1] * 1e3:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
