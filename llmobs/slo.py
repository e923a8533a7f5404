"""The one place that decides everything numeric: context buckets, targets, histogram boundaries."""

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ContextBucket:
    """A class of requests by prompt length.

    `limit` is the largest prompt, in tokens, that still belongs here (None: no limit). The targets
    are in seconds: `first_token` from arrival to the first token, `token_gap` for the longest pause
    between two output tokens of one request.
    """

    name: str
    limit: int | None
    first_token: float
    token_gap: float


UNKNOWN = "unknown"
"""The bucket of a request that was never tokenised."""


@dataclass(frozen=True)
class Slo:
    """Service level objectives and the boundaries that follow from them.

    TTFT targets are the user's: 4k < 300 ms, 32k < 800 ms. Nobody gave a figure above 32k tokens,
    so the target of 32k stands there too. 200 ms as the longest gap is our own choice: the P99 that
    the user calls healthy.
    """

    buckets: tuple[ContextBucket, ...] = (
        ContextBucket("0-1k", 1024, first_token=0.3, token_gap=0.2),
        ContextBucket("1k-4k", 4096, first_token=0.3, token_gap=0.2),
        ContextBucket("4k-32k", 32768, first_token=0.8, token_gap=0.2),
        ContextBucket("32k+", None, first_token=0.8, token_gap=0.2),
    )
    fine_seconds: tuple[float, ...] = (
        *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15),
        *(0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0, 5.0, 8.0, 15.0, 30.0, 60.0),
    )
    step_seconds: tuple[float, ...] = (
        *(0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 5.0),
    )
    batch_sizes: tuple[float, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    context_tokens: tuple[float, ...] = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    limits: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        limits = tuple(bucket.limit for bucket in self.buckets[:-1])
        if any(limit is None for limit in limits) or self.buckets[-1].limit is not None:
            raise ValueError("every context bucket but the last needs a limit, the last has none")
        object.__setattr__(self, "limits", limits)
        for name in ("fine_seconds", "step_seconds", "batch_sizes", "context_tokens", "limits"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name} must rise strictly: {values}")
        for bucket in self.buckets:
            for target in (bucket.first_token, bucket.token_gap):
                if target not in self.fine_seconds:
                    raise ValueError(f"target {target} of {bucket.name} is no histogram boundary")

    def bucket_index(self, prompt_tokens: int) -> int:
        """The index in `buckets` of a prompt of that many tokens."""
        return bisect_left(self.limits, prompt_tokens)


SLO = Slo()
BUCKET_NAMES = tuple(bucket.name for bucket in SLO.buckets)
