"""What every benchmark's command has in common."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import report
from benchmarks.__main__ import app
from benchmarks.conditions import CONDITIONS
from benchmarks.report import Table
from benchmarks.show import show
from compressor import machine
from compressor.errors import GateError

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


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One of a soak that measured nothing."""
    monkeypatch.setattr(machine, "LOOK_S", 0.1)
    context = report.context(report.Begun(), command="python -m benchmarks soak", seed=5, threads=1)
    return {"benchmark": "soak", **context}


def miss(result: Mapping[str, Any]) -> None:
    """Find that a target is missed."""
    raise GateError("targets missed")


def test_a_missed_target_is_told_after_the_result_and_not_of_a_quick_look(
    result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    show(result, [], None, quick=True, as_json=True, check=miss)
    capsys.readouterr()
    with pytest.raises(GateError, match="targets missed"):
        show(result, [], None, quick=False, as_json=True, check=miss)
    assert json.loads(capsys.readouterr().out)["quick"] is False


def test_a_result_is_shown_with_its_conditions(
    result: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = Table("Sizes", ["system", "MB"], [["teacher", "90.0"]])
    show(result, [table], tmp_path, quick=True, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((tmp_path / "soak.json").read_text())
    assert (shown["quick"], shown["seed"], shown["command"]) == (True, 5, "python -m benchmarks soak")
    assert shown["conditions"] == CONDITIONS["soak"]
    assert shown["machine"]["cores"] >= 1
