"""`llmobs generate` on the command line."""

import argparse
from pathlib import Path
from typing import TextIO

from llmobs.generate import files, operator
from llmobs.slo import SLO


def run(options: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Exit codes: 0; 1, with --check, for files that are not up to date; 2 bad input."""
    folder = Path(options.out)
    if options.format == "files":
        wanted, first = files.files(SLO), files.targets()
    else:
        wanted, first = operator.files(SLO), {}
    try:
        if options.check:
            paths = [folder / path for path in files.stale(folder, wanted)]
        else:
            paths = files.write(folder, wanted, first)
    except OSError as error:
        at = error.filename or options.out
        print(f"llmobs generate: {at}: {error.strerror}; --out is a folder to write to", file=err)
        return 2
    for path in paths:
        print(path, file=out)
    if options.check and paths:
        print("llmobs generate: these are not up to date; run it without --check", file=err)
    return int(options.check and bool(paths))
