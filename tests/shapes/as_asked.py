"""Takes back what vLLM's CPU platform decides whatever was asked for: spawn, no async scheduling.

So the code that runs on a GPU runs here too: forked processes, and the scheduler that is one step
ahead of the worker. It comes in as a plugin of vLLM, `installed` makes it one.
"""

import functools
import os
from pathlib import Path
from typing import Any

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def register() -> None:
    """Called by vLLM before it makes its configuration."""
    from vllm.platforms.cpu import CpuPlatform

    decide = CpuPlatform.check_and_update_config.__func__

    @functools.wraps(decide)
    def as_asked(cls: Any, vllm_config: Any) -> None:
        scheduling = vllm_config.scheduler_config.async_scheduling
        method = os.environ.get(METHOD)
        decide(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = scheduling
        if method is not None:
            os.environ[METHOD] = method

    CpuPlatform.check_and_update_config = classmethod(as_asked)  # type: ignore[assignment]


def installed(folder: Path) -> str:
    """A folder for PYTHONPATH in which this module is a plugin of vLLM."""
    metadata = folder / "as_asked-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: as-asked\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nas_asked = {__name__}:register\n"
    )
    return str(folder)
