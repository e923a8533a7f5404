"""The door that vLLM opens itself: `vllm.general_plugins`, in every process of the server."""

from llmobs import probes
from llmobs.guard import GUARD


def register() -> None:
    """Called by vLLM in its API servers, engine cores and workers. Never raises."""
    try:
        probes.attach()
    except Exception:
        GUARD.failed("attach")
