"""What the agent tells the others: where its page is, and what a person should read in the log."""

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
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as partial:
        json.dump(content, partial)
    os.replace(partial.name, path)


class State:
    """The file agent.json of a run folder. The server prints each of its notices once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "agent.json"
        self.content: dict[str, Any] = {"pid": os.getpid(), "notices": []}
        self._lock = threading.Lock()

    def update(self, **fields: Any) -> None:
        with self._lock:
            self.content |= fields
            try:
                write_json(self.path, self.content)
            except OSError as error:
                log.warning("%s: %s", self.path, error)

    def say(self, notice: str) -> None:
        """One line for the server's log."""
        log.info("%s", notice)
        if len(self.content["notices"]) < NOTICES_KEPT:
            self.update(notices=[*self.content["notices"], notice])
