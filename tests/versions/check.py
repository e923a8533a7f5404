"""Whether a version of vLLM has all that llmobs looks at."""

import ast
import importlib.util
import inspect
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_origin

from llmobs.probes import PROBES, Probe
from tests.versions.reads import FINISH_REASON, MEMBERS, READS, Read
from tests.versions.source import Absent, Function, Source, is_generator, parameters


@dataclass
class Report:
    """What was looked for and found, and what is wrong."""

    targets: int = 0
    parameters: int = 0
    attributes: int = 0
    later: list[str] = field(default_factory=list)
    """Attributes with a fallback that this version does not have."""
    problems: list[str] = field(default_factory=list)


def installed(package: str) -> Source:
    """What is installed beside the tests, unimported as well."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0]).parent

    def text(name: str) -> str | None:
        path = root / name
        return path.read_text() if path.is_file() else None

    return Source(text)


def check(vllm: Source, uvicorn: Source) -> Report:
    report = Report()
    sources = {"vllm": vllm, "uvicorn": uvicorn}
    for probe in PROBES:
        reasons = []
        for target in probe.targets:
            try:
                _check_target(probe, target, sources[target.partition(".")[0]])
            except Absent as reason:
                reasons.append(f"{target}: {reason}")
            else:
                report.targets += 1
                report.parameters += len(probe.parameters)
                break
        else:
            report.problems.append(f"probe {probe.name}: {'; '.join(reasons)}")
    for read in READS:
        _check_read(read, sources[read.place.partition(".")[0]], report)
    for place, members in MEMBERS:
        module, _, owner = place.partition(":")
        missing = set(members.split()) - set(vllm.attributes(module, owner))
        report.attributes += len(members.split()) - len(missing)
        report.problems += [f"{owner} has no {name}" for name in sorted(missing)]
    _check_numbers(vllm, report)
    return report


def _check_target(probe: Probe, target: str, source: Source) -> None:
    module, _, path = target.partition(":")
    owner, name = path.split(".")
    function = source.function(module, owner, name)
    decorators = {d.id for d in function.decorator_list if isinstance(d, ast.Name)}
    if decorators & {"staticmethod", "classmethod", "property"}:
        raise Absent(f"{name} is a {', '.join(decorators)}")
    missing = [p for p in probe.parameters if p not in parameters(function)]
    if missing:
        raise Absent(f"{name} has no parameter {', '.join(missing)}")
    if _sort(function) != _expected(probe):
        raise Absent(f"{name} is a {_sort(function)}, not a {_expected(probe)}")


def _sort(function: Function) -> str:
    asynchronous = "coroutine" if isinstance(function, ast.AsyncFunctionDef) else "function"
    return asynchronous + (" that yields" if is_generator(function) else "")


def _expected(probe: Probe) -> str:
    """What a probe may be put on: a call that is over when it returns, unless it transforms."""
    if probe.transform is None:
        return "function"
    returned = inspect.signature(probe.transform).return_annotation
    return "coroutine that yields" if get_origin(returned) is AsyncGenerator else "coroutine"


def _check_read(read: Read, source: Source, report: Report) -> None:
    module, _, owner = read.place.partition(":")
    try:
        names = set(source.attributes(module, owner))
    except Absent:
        names = set()
    for either in read.wanted:
        if names & set(either):
            report.attributes += 1
        else:
            report.problems.append(f"{owner} has no {' or '.join(either)}")
    fallbacks = read.all - {name for either in read.wanted for name in either}
    report.attributes += len(fallbacks & names)
    report.later += sorted(f"{owner}.{name}" for name in fallbacks - names)


def _check_numbers(vllm: Source, report: Report) -> None:
    place, numbers = FINISH_REASON
    module, _, owner = place.partition(":")
    found = {
        name: value.value
        for name, value in vllm.attributes(module, owner).items()
        if isinstance(value, ast.Constant)
    }
    for name, number in numbers.items():
        if found.get(name) == number:
            report.attributes += 1
        else:
            report.problems.append(f"{owner}.{name} is {found.get(name)}, not {number}")
