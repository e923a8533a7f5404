"""The GPU's clock, with a GPU of the test's own: events that are done when the test says so."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from llmobs.gpu_clock import GpuClock, cuda

FORWARD, SAMPLING = 40_000, 3_000


class Gpu:
    """Stands in for `torch.cuda`. `time` is its clock in ns; an event takes it when recorded, and
    is done `behind` events later. Waiting for it is a failure of the test."""

    def __init__(self) -> None:
        self.time = 0
        self.behind = 0
        self.capturing = False
        self.made = 0
        self.recorded = 0
        self.Event = self._event

    def _event(self, enable_timing: bool) -> Any:
        assert enable_timing
        self.made += 1
        return Event(self)

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def synchronize(self) -> None:
        raise AssertionError("it waited")


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at = self.number = 0

    def record(self) -> None:
        assert not self.gpu.capturing
        self.at = self.gpu.time
        self.gpu.recorded += 1
        self.number = self.gpu.recorded

    def query(self) -> bool:
        assert not self.gpu.capturing
        return self.gpu.recorded - self.number >= self.gpu.behind

    def elapsed_time(self, end: "Event") -> float:
        assert self.query()
        assert end.query()
        return (end.at - self.at) / 1e6

    def synchronize(self) -> None:
        raise AssertionError("it waited")

    wait = synchronize


class Worker:
    """Drives a clock as the worker's probes do. A batch's number is when its call began."""

    def __init__(self, gpu: Gpu, skip: int = 0) -> None:
        self.gpu = gpu
        self.told: list[tuple[int, int, int]] = []
        self.clock = GpuClock(gpu, lambda *times: self.told.append(times), lambda: skip)

    def batch(self, number: int, decodes: bool = False, sampled: bool = True) -> None:
        self.clock.forward_starts(decodes)
        self.gpu.time += FORWARD + number
        self.clock.forward_ends(number)
        if sampled:
            self.clock.sampling_starts()
            self.gpu.time += SAMPLING
            self.clock.sampling_ends()


def test_each_batch_has_its_own_times_when_the_next_begins() -> None:
    worker = Worker(Gpu())
    for number in range(1, 5):
        worker.batch(number)
    assert worker.told == [(n, 40_000 + n, 3_000) for n in (1, 2, 3)]
    assert worker.gpu.made == 4 * 1, "the events are used again"


def test_a_gpu_that_is_behind_is_not_waited_for() -> None:
    gpu = Gpu()
    worker = Worker(gpu)
    gpu.behind = 9  # the last two batches and the end of the one before
    for number in range(1, 11):
        worker.batch(number)
    assert [number for number, _, _ in worker.told] == [1, 2, 3, 4, 5, 6]
    assert gpu.made <= 4 * 5
    gpu.behind = 0
    worker.batch(11)
    assert worker.told == [(n, 40_000 + n, 3_000) for n in range(1, 11)]


def test_a_gpu_that_never_gets_there_costs_so_many_events_and_no_more() -> None:
    gpu = Gpu()
    gpu.behind = 1 << 30
    worker = Worker(gpu)
    for number in range(1, 200):
        worker.batch(number)
    assert worker.told == []
    assert gpu.made == 64
    gpu.behind = 0
    worker.batch(200)
    worker.batch(201)
    assert [number for number, _, _ in worker.told] == [*range(1, 17), 200]


def test_of_batches_that_only_decode_some_are_timed_and_of_the_others_all() -> None:
    worker = Worker(Gpu(), skip=3)
    for number in range(1, 41):
        worker.batch(number, decodes=number % 2 == 0)
    numbers = [number for number, _, _ in worker.told]
    assert [n for n in numbers if n % 2] == list(range(1, 40, 2))
    assert [n for n in numbers if not n % 2] == [8, 16, 24, 32]


def test_one_in_eight_in_the_long_run_and_in_no_rhythm() -> None:
    told: list[int] = []
    gpu = Gpu()
    clock = GpuClock(gpu, lambda began, forward, sampling: told.append(began))
    for number in range(1, 20_001):
        clock.forward_starts(True)
        clock.forward_ends(number)
        clock.sampling_starts()
        clock.sampling_ends()
    assert 2_200 < len(told) < 2_800
    assert {number % 8 for number in told} == set(range(8))


def test_without_sampling_the_forward_pass_is_told_alone() -> None:
    worker = Worker(Gpu())
    worker.batch(1, sampled=False)
    worker.batch(2)
    worker.batch(3)
    assert worker.told == [(1, 40_001, -1), (2, 40_002, 3_000)]


def test_a_forward_pass_that_failed_is_not_told() -> None:
    worker = Worker(Gpu())
    worker.clock.forward_starts(False)
    for number in (1, 2):
        worker.batch(number)
    assert worker.told == [(1, 40_001, 3_000)]
    assert worker.gpu.made == 4


def test_nothing_is_asked_while_a_graph_is_captured() -> None:
    worker = Worker(Gpu())
    worker.batch(1)
    worker.gpu.capturing = True  # any event would fail the test
    worker.batch(2)
    worker.batch(3)
    worker.gpu.capturing = False
    worker.batch(4)
    worker.batch(5)
    assert worker.told == [(1, 40_001, 3_000), (4, 40_004, 3_000)]


@pytest.mark.parametrize("initialised", [False, True])
def test_whether_there_is_a_gpu_is_asked_without_using_it(
    monkeypatch: pytest.MonkeyPatch, initialised: bool
) -> None:
    asked = SimpleNamespace(is_initialized=lambda: initialised)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=asked))
    assert cuda() is (asked if initialised else None)


def test_without_pytorch_it_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert cuda() is None
    assert "torch" not in sys.modules


def test_pytorch_has_what_is_used_and_its_cpu_build_says_no() -> None:
    import torch

    for name in ("is_initialized", "is_current_stream_capturing", "Event"):
        assert hasattr(torch.cuda, name)
    for name in ("record", "query", "elapsed_time"):
        assert hasattr(torch.cuda.Event, name)
    assert cuda() is None
    assert not torch.cuda.is_initialized()
