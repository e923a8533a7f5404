"""llmobs: why did this LLM server's P99 jump? An observability stack for vLLM."""

__version__ = "0.1.0"
