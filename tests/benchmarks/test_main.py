from pathlib import Path

import pytest

from benchmarks import __main__ as command_line
from tests import tiny
from tests.conftest import Line
from tests.tiny import Ended


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """Run a command as `python -m benchmarks` does."""
    return tiny.main(monkeypatch, capsys, *arguments, entry=command_line.main)


def test_an_unknown_flag_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(monkeypatch, capsys, "compare", "--qick")
    assert code == 2
    assert "--qick" in err


def test_a_missing_run_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(monkeypatch, capsys, "compare", "--run", tmp_path / "none", "--json")
    assert (code, out) == (1, "")
    assert err.startswith("error: --run")
    assert err.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_refused_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    done = run(monkeypatch, capsys, "compare", "--run", tmp_path / "none", "--out", tmp_path / "taken")
    assert done.code == 1
    assert done.err.startswith(f"error: cannot write to --out {tmp_path / 'taken'}: ")
    done = run(monkeypatch, capsys, "compare", "--run", tmp_path / "none", "--out", tmp_path / "new" / "out")
    assert done.code == 1
    assert list((tmp_path / "new" / "out").iterdir()) == []


def test_help_names_the_files_that_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, page in {"compare": True, "scale": True, "soak": False}.items():
        code, out, _ = run(monkeypatch, capsys, command, "--help")
        assert code == 0
        assert (".html" in out) is page


def test_an_unpublished_repository_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: Line, tmp_path: Path
) -> None:
    done = run(monkeypatch, capsys, "compare", "--run", line.run, "--repository", tmp_path / "none")
    assert done.code == 1
    assert "does not exist" in done.err
