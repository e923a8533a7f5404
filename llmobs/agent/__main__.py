"""The agent: watches the servers of one run folder, and ends with the last of them."""

import argparse
import fcntl
import logging
import os
import sys
import time
from pathlib import Path

LOCK_TRIES = 10

log = logging.getLogger("llmobs.agent")


def detach() -> None:
    """Become nobody's child, so that the server's recursive kill at its end misses us."""
    if os.fork():
        os._exit(0)
    # A process group of its own, so that the terminal's signals miss us, but no session: under
    # Linux's autogroups a session is also a scheduling group, and on 2 busy cores the page then
    # took up to 11 s (seen on Linux 6.18), just when it is wanted.
    os.setpgid(0, 0)


def main(argv: list[str] | None = None) -> int:
    """Run until the servers are gone. Exit codes: 0 done, or another agent is there already; 2 bad
    input."""
    parser = argparse.ArgumentParser(prog="llmobs agent", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The agent's command line, shared with `llmobs agent`."""
    parser.add_argument("folder", type=Path, help="the run folder; with --stay it is made")
    parser.add_argument("--detach", action="store_true", help="go to the background")
    parser.add_argument(
        "--stay", action="store_true", help="wait for servers to come, and outlive them"
    )


def run(options: argparse.Namespace) -> int:
    """Take the folder's lock and watch, in the background if asked to."""
    if options.detach:
        detach()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        if options.stay:
            options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(options.folder / "agent.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        for tries_left in range(LOCK_TRIES, -1, -1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Another agent, or only a process that looks whether there is one.
                if not tries_left:
                    return 0
                time.sleep(0.02)
    except OSError as error:
        print(f"llmobs agent: {options.folder}: {error.strerror}", file=sys.stderr)
        return 2
    # Imported late: detaching must not wait for numpy.
    from llmobs.agent.watch import watch

    return watch(options.folder, lock, options.stay)


if __name__ == "__main__":
    sys.exit(main())
