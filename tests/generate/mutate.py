"""Changes each threshold, guard and duration of the rules in turn; some test must fail each time.

`make mutations`: all of them, some minutes. The tests run a sample.
"""

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmobs.generate.rules import content, dump
from llmobs.slo import SLO
from tests.generate import cases, promtool, test_alerts, test_burn, test_stalled

Test = Callable[[Path], None]
NUMBER = re.compile(r"((?:>=|<=|>|<|and \S+ >=) (?:on \([^)]*\) )?)(\d+(?:\.\d+)?(?:e-\d+)?)")
TIMES = re.compile(r"(?<= )(\d+(?:\.\d+)?) \* ")
WINDOW = re.compile(r"\[(\d+)([mhd])\]")
OFFSET = re.compile(r"offset (\d+)m")


def tests(alert: str) -> list[Test]:
    """What there is to notice a change of that alert."""
    found: list[Test] = []
    if any(case.alert == alert for case in cases.CASES):
        found.append(lambda folder: test_alerts.test_on_the_minute(folder, alert))
    of: dict[str, list[Test]] = {
        "LLMFirstTokenBurn": [
            test_burn.test_the_row_of_an_hour,
            test_burn.test_one_bad_request_pages_nobody,
            test_burn.test_the_long_rows,
            lambda folder: test_burn.test_both_windows_must_burn(folder, alert),
            lambda folder: test_burn.test_few_are_too_few_in_every_row(folder, alert),
        ],
        "LLMAvailabilityBurn": [
            test_burn.test_availability,
            test_burn.test_few_errors_page_nobody,
            test_burn.test_the_long_rows_of_availability,
            lambda folder: test_burn.test_both_windows_must_burn(folder, alert),
            lambda folder: test_burn.test_few_are_too_few_in_every_row(folder, alert),
        ],
        "LLMHealthBurn": [
            test_burn.test_health,
            test_burn.test_the_long_rows_of_health,
            test_burn.test_both_windows_of_health_must_burn,
        ],
        "LLMEngineStalled": [
            test_stalled.test_requests_run_and_nothing_moves,
            test_stalled.test_requests_that_the_engine_never_saw,
        ],
        "LlmobsAbsent": [
            test_stalled.test_a_server_that_llmobs_does_not_tell_of,
            test_stalled.test_a_page_without_llmobs,
        ],
    }
    return found + of.get(alert, [])


@dataclass(frozen=True)
class Mutation:
    """The alert with these labels, with another expression or `for`."""

    labels: dict[str, str]
    name: str
    what: str
    key: str
    value: str

    def __call__(self, rules: str) -> str:
        found: dict[str, Any] = yaml.safe_load(rules)
        for rule in (rule for group in found["groups"] for rule in group["rules"]):
            if "alert" in rule and rule["labels"] == self.labels:
                rule[self.key] = self.value
        return dump(found)


def expressions(expr: str) -> Iterator[tuple[str, str]]:
    """(what was changed, the changed expression)"""
    for match in NUMBER.finditer(expr):
        old = float(match[2])
        if match[2] in ("0", "1e-4") or " 1\n" in expr[match.start() : match.end() + 1]:
            continue  # a division by nothing, not a threshold
        for factor in (0.6, 1.4):
            new = f"{old * factor:.10g}"
            yield (
                f"{match[0]} → {new}",
                expr[: match.start(2)] + new + expr[match.end(2) :],
            )
    for match in TIMES.finditer(expr):
        if match[1] == "0":
            continue
        for factor in (0.6, 1.7):
            new = f"{float(match[1]) * factor:.10g}"
            yield f"{match[0]}→ {new}", expr[: match.start(1)] + new + expr[match.end(1) :]
    # A guard is a line of its own that begins with `and` or `unless`.
    lines = expr.split("\n")
    for n, line in enumerate(lines):
        if re.match(r"(and|unless) [^(]*(\(|llmobs)", line) and n:
            rest = n + 1
            while rest < len(lines) and lines[rest].startswith((" ", ")")):
                rest += 1
            yield f"without {line[:60]}", "\n".join(lines[:n] + lines[rest:])


def mutations(alert: str) -> Iterator[Mutation]:
    for group in content(SLO)["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") != alert:
                continue
            tag = rule["labels"].get("long", "") or rule["labels"].get("target", "")
            name = f"{alert} {tag}".strip()
            for what, expr in expressions(rule["expr"]):
                yield Mutation(rule["labels"], name, what, "expr", expr)
            for longer in (True, False):
                old = rule["for"]
                new = other(old, longer)
                if new != old:
                    yield Mutation(rule["labels"], name, f"for {old} → {new}", "for", new)


def other(text: str, longer: bool) -> str:
    number, unit = int(text[:-1]), text[-1]
    seconds = number * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    if not seconds:
        return "2m" if longer else text
    step = 10 if seconds < 60 else 60 if seconds < 600 else 1200
    return f"{seconds + step if longer else max(seconds - step, 0)}s"


def killed(mutation: Mutation, alert: str) -> bool:
    """Whether any of the alert's tests fails."""
    promtool.CHANGE = mutation
    try:
        for test in tests(alert):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    test(Path(folder))
                except AssertionError:
                    return True
        return False
    finally:
        promtool.CHANGE = str


def main() -> int:
    wanted = set(sys.argv[1:])
    survived = total = 0
    names = dict.fromkeys(
        rule["alert"]
        for group in content(SLO)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    )
    for alert in names:
        if wanted and alert not in wanted:
            continue
        for mutation in mutations(alert):
            total += 1
            if not killed(mutation, alert):
                survived += 1
                print(f"SURVIVED {mutation.name}: {mutation.what}", flush=True)
        print(f"{alert}: done, {total} so far", flush=True)
    print(f"{total - survived} of {total} changes were noticed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
