"""Checks vLLM's versions, the newest on the package index too; writes docs/versions.md.

python -m tests.versions                                    check, and write the page
python -m tests.versions --ran 0.20.2 RESULTS.xml ...   take in what pytest really ran
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

from tests.versions.check import check, installed
from tests.versions.page import PAGE, RAN, page, write_ran
from tests.versions.source import Source
from tests.versions.wheel import PINNED, Wheel, newest, wheels


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--ran"]:
        write_ran(RAN, arguments[1], results(arguments[2:]))
        return 0
    failed = False
    last = newest(wheels())
    for version in dict.fromkeys((*PINNED, last)):
        wheel = Wheel(version, PINNED.get(version))
        report = check(Source(wheel.text), installed("uvicorn"))
        failed = failed or bool(report.problems)
        print(
            f"vLLM {version}: {report.targets} targets, {report.parameters} parameters, "
            f"{report.attributes} attributes found, {len(report.problems)} problems"
            + (f"; not pinned yet, its RECORD is {wheel.pin}" if version not in PINNED else "")
        )
        for problem in report.problems:
            print(f"  {problem}")
    PAGE.write_text(page())
    return int(failed)


def results(paths: list[str]) -> dict[str, int]:
    """How many tests passed, by their module. Raises ValueError if one did anything else."""
    passed: Counter[str] = Counter()
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            if len(case):
                raise ValueError(f"{path}: {case.get('name')} did not pass")
            passed[case.get("classname", "").rpartition(".")[2]] += 1
    return dict(passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
