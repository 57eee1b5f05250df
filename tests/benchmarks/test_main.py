import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command_line


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run a command as `python -m benchmarks` does; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    return int(left.value.code or 0)


def test_an_unknown_flag_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "compare", "--qick") == 2
    assert "--qick" in capsys.readouterr().err


def test_a_missing_run_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "compare", "--run", str(tmp_path / "none"), "--json") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --run")
    assert err.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_refused_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    assert run(monkeypatch, "compare", "--run", str(tmp_path / "none"), "--out", str(tmp_path / "taken")) == 1
    assert capsys.readouterr().err.startswith(f"error: cannot write to --out {tmp_path / 'taken'}: ")
    assert run(monkeypatch, "compare", "--run", str(tmp_path / "none"), "--out", str(tmp_path / "new" / "out")) == 1
    assert list((tmp_path / "new" / "out").iterdir()) == []


def test_help_names_the_files_that_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, page in {"compare": True, "scale": True, "soak": False}.items():
        assert run(monkeypatch, command, "--help") == 0
        assert (".html" in capsys.readouterr().out) is page


def test_an_unpublished_repository_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_build: Any, tmp_path: Path
) -> None:
    assert run(monkeypatch, "compare", "--run", str(tiny_build.run), "--repository", str(tmp_path / "none")) == 1
    assert "does not exist" in capsys.readouterr().err
