"""What every benchmark's command has in common."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import report
from benchmarks.__main__ import app
from benchmarks.conditions import CONDITIONS
from benchmarks.report import Table
from benchmarks.show import show

COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]


def test_all_commands_are_walked_over() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_takes_json_and_quick(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert {"--json", "--quick", "--out"} <= options
    assert COMMANDS[name].help


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_s_result_says_what_it_holds_for(name: str) -> None:
    # Those of compare and scale are in their modules: they have several, by what is measured.
    assert name in ("compare", "scale") or len(CONDITIONS[name]) > 40


def test_a_result_is_shown_with_its_conditions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = {
        "benchmark": "soak",
        **report.context(report.Begun(), command="python -m benchmarks soak", seed=5, threads=1),
    }
    table = Table("Sizes", ["system", "MB"], [["teacher", "90.0"]])
    show(result, [table], tmp_path, quick=True, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((tmp_path / "soak.json").read_text())
    assert (shown["quick"], shown["seed"], shown["command"]) == (True, 5, "python -m benchmarks soak")
    assert shown["conditions"] == CONDITIONS["soak"]
    assert shown["machine"]["cores"] >= 1
