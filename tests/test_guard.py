"""The host's call stands alone: its result, its exception, its arguments."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from llmobs.guard import GUARD, positions, wrap


class HostError(Exception):
    pass


class Host:
    """What is wrapped."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def call(self, first: Any, second: Any = 2, *, third: Any = 3) -> str:
        """Told apart by its own words."""
        self.calls.append((first, second, third))
        if isinstance(first, BaseException):
            raise first
        return "result"


def raises(*_: Any) -> None:
    raise RuntimeError("ours")


Wrapped = Callable[..., Any]


def wrapped(after: Any, before: Any = None, parameters: tuple[str, ...] = ()) -> Wrapped:
    return wrap("probe", Host.call, after, before, parameters)


@pytest.mark.parametrize("parameters", [(), ("first",), ("first", "second")])
@pytest.mark.parametrize(
    ("before", "after", "failures"),
    [(None, raises, 1), (raises, lambda *_: None, 1), (raises, raises, 1)],
)
def test_our_failures_change_nothing(
    caplog: pytest.LogCaptureFixture,
    parameters: tuple[str, ...],
    before: Any,
    after: Any,
    failures: int,
) -> None:
    counted: list[str] = []
    GUARD.on_failure = counted.append
    call, host = wrapped(after, before, parameters), Host()
    for _ in range(3):
        assert call(host, 1, second=5, third=6) == "result"
    assert host.calls == [(1, 5, 6)] * 3
    assert GUARD.failures == {"probe": 3 * failures}
    assert counted == ["probe"] * 3 * failures
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "probe probe failed; the server is unaffected" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is RuntimeError


@pytest.mark.parametrize("parameters", [(), ("first",), ("first", "second")])
@pytest.mark.parametrize("before", [None, raises, lambda *_: None])
@pytest.mark.parametrize(
    "error", [HostError("theirs"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()]
)
def test_the_hosts_exception_passes_unchanged(
    parameters: tuple[str, ...], before: Any, error: BaseException
) -> None:
    seen: list[Any] = []
    call = wrapped(lambda *arguments: seen.append(arguments), before, parameters)
    with pytest.raises(type(error)) as caught:
        call(Host(), error)
    assert caught.value is error
    assert caught.value.__context__ is None
    assert seen == []


@pytest.mark.parametrize(
    ("error", "told"),
    [(HostError("theirs"), 1), (KeyboardInterrupt(), 0), (SystemExit(3), 0), (GeneratorExit(), 0)],
)
@pytest.mark.parametrize("fails", [False, True])
def test_who_is_told_of_the_hosts_exceptions_changes_nothing(
    error: BaseException, told: int, fails: bool
) -> None:
    seen: list[Any] = []

    def raised(probe: str, error: Exception) -> None:
        seen.append((probe, error))
        if fails:
            raise RuntimeError("ours")

    call = wrap("probe", Host.call, lambda *_: None, raised=raised)
    assert call(Host(), 1) == "result"
    with pytest.raises(type(error)) as caught:
        call(Host(), error)
    assert caught.value is error
    assert caught.value.__context__ is None
    assert seen == [("probe", error)] * told
    assert GUARD.failures == ({"probe": 1} if fails and told else {})


@pytest.mark.parametrize("before", [None, lambda *_: "token"])
@pytest.mark.parametrize(
    ("arguments", "keywords", "first", "second"),
    [
        ((1, 5), {}, 1, 5),
        ((1,), {"second": 5}, 1, 5),
        ((), {"second": 5, "first": 1}, 1, 5),
        ((), {"first": 1, "third": 9}, 1, None),
        ((1,), {}, 1, None),
    ],
)
def test_parameters_are_bound_by_name(
    before: Any, arguments: tuple, keywords: dict, first: int, second: int | None
) -> None:
    """One that was left out is None."""
    seen: list[Any] = []
    host = Host()
    call = wrapped(lambda *got: seen.append(got), before, ("first", "second"))
    call(host, *arguments, **keywords)
    token = None if before is None else "token"
    assert seen == [(token, "result", host, first, second)]


@pytest.mark.parametrize("arguments", [((7,), {}), ((), {"first": 7})])
def test_a_single_parameter(arguments: tuple) -> None:
    seen: list[Any] = []
    host = Host()
    wrapped(lambda *got: seen.append(got), None, ("first",))(host, *arguments[0], **arguments[1])
    assert seen == [(None, "result", host, 7)]


def test_before_runs_before_and_after_gets_its_token() -> None:
    order: list[Any] = []
    host = Host()

    def before(instance: Any, first: Any) -> str:
        order.append(("before", list(instance.calls), first))
        return "token"

    def after(token: Any, result: Any, instance: Any, first: Any) -> None:
        order.append(("after", token, result, list(instance.calls), first))

    wrapped(after, before, ("first",))(host, 1)
    assert order == [("before", [], 1), ("after", "token", "result", [(1, 2, 3)], 1)]


def test_a_wrong_call_is_the_hosts_own_error() -> None:
    call = wrapped(lambda *_: None, None, ("first",))
    with pytest.raises(TypeError, match=r"call\(\) missing 1 required positional argument"):
        call(Host())
    with pytest.raises(TypeError, match="unexpected keyword argument 'fourth'"):
        call(Host(), 1, fourth=4)
    assert GUARD.failures == {}


def test_the_wrapper_looks_like_the_original() -> None:
    call = wrapped(lambda *_: None)
    assert call.__name__ == "call"
    assert call.__doc__ == "Told apart by its own words."
    assert call.__wrapped__ is Host.call  # type: ignore[attr-defined]


def test_a_parameter_that_is_gone_keeps_the_probe_off() -> None:
    assert positions(Host.call, ("third", "self", "first")) == (3, 0, 1)
    with pytest.raises(LookupError, match=r"Host\.call has no parameter fourth, fifth"):
        wrapped(raises, None, ("first", "fourth", "fifth"))


def test_the_guard_itself_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    GUARD.on_failure = raises
    monkeypatch.setattr(logging.getLogger("llmobs"), "warning", raises)
    assert wrapped(raises)(Host(), 1) == "result"
    assert GUARD.failures == {"probe": 1}
