"""Pieces of PromQL that every rule and panel is made of."""

import re
from collections.abc import Iterable

from prometheus_client.utils import floatToGoString

SERVICE = ("job", "model_name")
"""All replicas of a model, as far as one scrape job has them."""
SERVER = ("job", "instance")
ENGINE = ("job", "instance", "model_name", "engine")


def duration(seconds: float) -> str:
    """As Prometheus writes it: 300ms, 30s, 5m, 6h, 3d."""
    if seconds != int(seconds):
        return f"{round(seconds * 1000)}ms"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds and seconds % length == 0:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"


def number(value: float) -> str:
    """Without the noise of binary fractions."""
    return f"{value:.10g}"


def le(bound: float) -> str:
    """A histogram's boundary as the page writes it."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


def one_of(values: Iterable[str]) -> str:
    """A regular expression for some label values."""
    return "|".join(re.sub(r"([+.])", r"[\1]", value) for value in values)


def total(by: tuple[str, ...], selector: str, window: str, function: str = "rate") -> str:
    """The sum of a counter's rate (or increase): the rate first, then the sum."""
    return f"sum by ({', '.join(by)}) ({function}({selector}[{window}]))"


def ratio(part: str, whole: str) -> str:
    """A share that is 0, not absent, where there is no part, and absent where there is no whole."""
    return f"(\n  {part}\n  or 0 * {whole}\n)\n/ ({whole} > 0)"


def quantile(q: float, by: tuple[str, ...], selector: str, window: str) -> str:
    """`selector` without the braces' le, of the _bucket series."""
    return f"histogram_quantile({number(q)}, {total((*by, 'le'), selector, window)})"
