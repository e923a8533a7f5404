"""The one guard: vLLM's call stands alone, whatever happens to ours."""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("llmobs")

Observer = Callable[..., None]
"""Called after vLLM's own call: what `before` returned, the result, the arguments wanted."""


class Guard:
    """Counts and swallows the failures of our own code, per probe.

    `count` is given by whoever keeps the totals; failures before that are kept and handed over.
    """

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}
        self.total = 0
        self._said: set[str] = set()
        self.on_failure: Callable[[str], None] | None = None

    def failed(self, probe: str) -> None:
        """Count one failure; must be called from an `except` block. The first of each probe is said
        with its traceback, at debug level all are."""
        try:
            self.total += 1
            self.failures[probe] = self.failures.get(probe, 0) + 1
            if probe not in self._said:
                self._said.add(probe)
                log.warning(
                    "llmobs: probe %s failed; the server is unaffected, further failures are "
                    "counted in llmobs_guard_errors_total",
                    probe,
                    exc_info=True,
                )
            if self.on_failure is not None:
                self.on_failure(probe)
        except Exception:  # the guard itself must never raise
            pass


GUARD = Guard()


def positions(function: Callable[..., Any], names: tuple[str, ...]) -> tuple[int, ...]:
    """Where the named parameters stand in a call by position.

    Raises LookupError for a parameter that the function does not have: the probe stays off then.
    """
    parameters = list(inspect.signature(function).parameters)
    missing = [name for name in names if name not in parameters]
    if missing:
        raise LookupError(f"{function.__qualname__} has no parameter {', '.join(missing)}")
    return tuple(parameters.index(name) for name in names)


def wrap(
    probe: str,
    original: Callable[..., Any],
    after: Observer,
    before: Callable[..., Any] | None = None,
    parameters: tuple[str, ...] = (),
    raised: Callable[[str, Exception], None] | None = None,
) -> Callable[..., Any]:
    """Wrap a method: call `original` first, keep its result or exception, then observe.

    `after(token, result, instance, *wanted)` sees what `before(instance, *wanted)` returned (None
    without it) and the wanted parameters, bound by name whichever way they were passed; it is not
    called when `before` or `original` raised. `raised(probe, error)` is told when `original` did;
    its caller gets that very exception.
    """
    failed = GUARD.failed
    pick = _picker(positions(original, parameters), parameters)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        token = wanted = None
        try:
            wanted = pick(args, kwargs)
            if before is not None:
                token = before(args[0], *wanted)
        except Exception:
            wanted = None  # without its token `after` could only do harm
            failed(probe)
        try:
            result = original(*args, **kwargs)
        except Exception as error:
            if raised is not None:
                try:
                    raised(probe, error)
                except Exception:
                    failed(probe)
            raise
        if wanted is not None:
            try:
                after(token, result, args[0], *wanted)
            except Exception:
                failed(probe)
        return result

    return wrapper


def wrap_rare(
    probe: str, original: Callable[..., Any], after: Callable[[Any], None]
) -> Callable[..., Any]:
    """Wrap a method that vLLM calls in loops and that mostly has nothing to tell: `after(instance)`
    is called where it returned something true, and else next to nothing is done."""
    failed = GUARD.failed

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if result:
            try:
                after(args[0])
            except Exception:
                failed(probe)
        return result

    return wrapper


def _picker(places: tuple[int, ...], names: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    """How to find the wanted arguments of a call: by position, by keyword, or None (a default)."""
    if not places:
        return lambda args, kwargs: ()
    if len(places) == 1:
        place, name = places[0], names[0]
        return lambda args, kwargs: (args[place] if place < len(args) else kwargs.get(name),)
    if len(places) == 2:  # once a step: a loop takes twice as long
        (one, other), (first, second) = places, names
        return lambda args, kwargs: (
            args[one] if one < len(args) else kwargs.get(first),
            args[other] if other < len(args) else kwargs.get(second),
        )
    pairs = tuple(zip(places, names, strict=True))
    return lambda args, kwargs: tuple(
        args[place] if place < len(args) else kwargs.get(name) for place, name in pairs
    )
