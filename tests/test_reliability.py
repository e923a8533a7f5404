"""The generated sections of docs/reliability.md."""

from pathlib import Path

import pytest

from tests import reliability


def test_a_section_is_replaced_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reliability.md"
    monkeypatch.setattr(reliability, "PATH", path)
    reliability.write_section("Shapes", ["shape", "result"], [["fork", "exact"]], "Seen\nonce.")
    reliability.write_section("Faults", ["fault"], [["a|b\nc"]])
    reliability.write_section("Shapes", ["shape", "result"], [["spawn", r"as \1 it is"]])
    assert path.read_text() == (
        "# Reliability\n\nEach section is written by the run that it names; do not edit.\n\n"
        "<!-- begin Shapes -->\n## Shapes\n\n| shape | result |\n| --- | --- |\n"
        "| spawn | as \\1 it is |\n<!-- end Shapes -->\n\n"
        "<!-- begin Faults -->\n## Faults\n\n| fault |\n| --- |\n| a\\|b c |\n<!-- end Faults -->\n"
    )
