"""What the agent tells the others: where its page is, and what a person should read in the log."""

import contextlib
import json
import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

NOTICES_KEPT = 50

log = logging.getLogger("llmobs.agent")


def write_json(path: Path, content: object) -> None:
    """Replace a file as a whole: its readers never see half of it."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "w") as file:
            json.dump(content, file)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


class State:
    """The file agent.json of a run folder. The server prints each of its notices once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "agent.json"
        self.content: dict[str, Any] = {"pid": os.getpid(), "notices": []}
        self._lock = threading.Lock()
        self._unwritten = False

    def update(self, **fields: Any) -> None:
        with self._lock:
            self.content |= fields
            self._write()

    def retry(self) -> None:
        """Write what could not be written before: there may be space again."""
        with self._lock:
            if self._unwritten:
                self._write()

    def _write(self) -> None:
        try:
            write_json(self.path, self.content)
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                log.warning("%s: %s", self.path, error)
            self._unwritten = True

    def say(self, notice: str) -> None:
        """One line for the server's log."""
        log.info("%s", notice)
        if len(self.content["notices"]) < NOTICES_KEPT:
            self.update(notices=[*self.content["notices"], notice])
