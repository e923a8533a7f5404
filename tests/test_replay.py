"""The replay of benchmarks/replay.py in small: the agent's page against what the writer counted."""

import os
import signal
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.replay import (
    FAST,
    FLOOD,
    differences,
    differences_of_all,
    incomplete,
    told,
    watched,
)

pytestmark = pytest.mark.timeout(180)
NO_COLLECTOR = "http://127.0.0.1:9"


def test_what_is_lost_is_counted_and_the_rest_is_right() -> None:
    with watched(NO_COLLECTOR) as server:
        server.do("stream", FAST, 1000)
        server.do("drain", FAST)
        assert server.ended() > 250
        assert differences_of_all(server.settled(), server.truth) == []

        # 100,000 records of the front end alone while nobody reads; a ring holds 40,000.
        server.do("record", FLOOD, 400, 200_000)
        os.kill(server.agent, signal.SIGSTOP)
        server.do("blast")
        os.kill(server.agent, signal.SIGCONT)
        server.do("stream", FAST, 600)
        server.do("drain", FAST)
        figures = server.settled()
        assert differences(figures, server.truth) == []
        lost = figures.total("llmobs_records_lost_total")
        assert lost > 60_000
        assert incomplete(figures) > 10_000

        ended = server.ended()
        server.do("stream", FAST, 600)
        server.do("drain", FAST)
        again = server.settled()
        assert differences(again, server.truth) == []
        assert told(again) - told(figures) == server.ended() - ended > 100
        assert again.total("llmobs_records_lost_total") == lost

        read = server.end()
        assert {role: sum(both) for role, both in read.items()} == server.truth.written
        assert sum(number for _, number in read.values()) == lost


def test_a_difference_is_seen() -> None:
    with watched(NO_COLLECTOR) as server:
        server.do("stream", FAST, 300)
        server.do("drain", FAST)
        figures, truth = server.settled(), server.truth
    assert differences_of_all(figures, truth) == []
    one_more = Counter({"0-1k": 1})
    for name in ("received", "preempted", "prompts", "generated", "gaps", "firsts"):
        wrong = replace(truth, **{name: getattr(truth, name) + one_more})
        assert len(differences_of_all(figures, wrong)) == 1
    ended = replace(truth, ended=truth.ended + Counter({("0-1k", "stop"): 1}))
    assert len(differences_of_all(figures, ended)) == 2
    assert len(differences_of_all(figures, replace(truth, steps=truth.steps + 1))) == 1
