"""`compressor augment-file`: its options, and what it prints."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from compressor.cli_augment import augment_file as command
from compressor.config import AugmentConfig
from compressor.errors import CompressorError, ConfigError
from compressor.stages.augment.file import Columns, augment_file
from tests import augmenting, tiny
from tests.augmenting import read, table


def test_the_command_writes_the_file_and_says_what_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out, vectors = table(tmp_path / "in.csv"), tmp_path / "out.jsonl", augmenting.glove(tmp_path / "v.txt")
    given = ("--text", "review", "--copies", 2, "--vectors", vectors)
    done = tiny.main(monkeypatch, capsys, "augment-file", source, out, *given)
    assert done.code == 0, done.err
    count = len(read(out))
    assert done.out.startswith(f"{out}: {count} rows, from 3; ")
    with pytest.raises(ConfigError, match=r"out.jsonl is there already; give another OUT, or --overwrite to replace"):
        command(source, out, text="review", copies=2, vectors=vectors)
    command(source, out, text="review", copies=2, vectors=vectors, overwrite=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["written_rows"] == count


def test_the_command_takes_stop_words_and_names(tmp_path: Path) -> None:
    source = table(tmp_path / "in.jsonl", [{"review": "the good Film"}])
    (tmp_path / "stop.txt").write_text("good\nmovie\n", encoding="utf-8")
    given: dict[str, Any] = {
        "text": "review",
        "copies": 30,
        "vectors": augmenting.glove(tmp_path / "v.txt"),
        "overwrite": True,
    }

    def made(**options: Any) -> set[str]:
        command(source, tmp_path / "out.jsonl", **given, **options)
        return {row["review"] for row in read(tmp_path / "out.jsonl")}

    assert made() == {f"the {word} Film" for word in augmenting.VECTORS if word != "not"}
    stopped = made(stop_words=str(tmp_path / "stop.txt"), keep_names=False)
    assert {text.rsplit(" ", 1)[0] for text in stopped} == {"the good"}
    assert "the good Picture" in stopped
    assert "the good Movie" not in stopped


def test_the_command_has_options_for_stop_words_and_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, vectors = table(tmp_path / "in.jsonl", [{"review": "a Film"}]), augmenting.glove(tmp_path / "v.txt")
    given: tuple[object, ...] = ("--text", "review", "--copies", 2, "--vectors", vectors, "--no-keep-names")
    done = tiny.main(monkeypatch, capsys, "augment-file", source, tmp_path / "out.jsonl", *given)
    assert done.out.startswith(f"{tmp_path / 'out.jsonl'}: 3 rows, from 1; "), done.err
    given += ("--stop-words", "absent.txt")
    done = tiny.main(monkeypatch, capsys, "augment-file", source, tmp_path / "b.jsonl", *given)
    assert "augment.stop_words is 'absent.txt', and there is no such file" in tiny.sentence(done)


@pytest.mark.parametrize(
    ("source", "out", "reason"),
    [
        ("nowhere.csv", "out.csv", "is no file"),
        ("in.csv", "in.csv", "IN and OUT are both"),
        ("in.csv", ".", "there already"),
        ("in.csv", "nodir/out.csv", "and there is no folder .*nodir; make it, or give another OUT"),
    ],
)
def test_the_command_refuses_wrong_places(tmp_path: Path, source: str, out: str, reason: str) -> None:
    table(tmp_path / "in.csv")
    with pytest.raises(CompressorError, match=reason):
        command(tmp_path / source, tmp_path / out, text="review", overwrite=True)


def test_the_command_refuses_a_device_that_there_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = (table(tmp_path / "in.csv"), tmp_path / "o.csv")
    done = tiny.main(monkeypatch, capsys, "augment-file", *places, "--text", "review", "--device", "gpu")
    assert tiny.sentence(done) == "error: --device is 'gpu'; known: auto, cpu, cuda"


def test_the_command_takes_candidates_and_the_probability_of_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out, vectors = table(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", augmenting.glove(tmp_path / "v.txt")
    given = ("--text", "review", "--copies", 2, "--vectors", vectors, "--candidates", 1, "--replace-probability", 0.9)
    done = tiny.main(monkeypatch, capsys, "augment-file", source, out, *given, "--json")
    assert done.code == 0, done.err
    config = augmenting.settings(2, vectors=vectors, candidates=1, replace_probability=0.9, keep_names=True)
    augment_file(source, tmp_path / "same.jsonl", Columns(text="review"), config, seed=42)
    assert out.read_bytes() == (tmp_path / "same.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"augment.replace_probability.* 1"):
        command(source, out, text="review", vectors=vectors, replace_probability=1.0, overwrite=True)


def test_defaults_of_the_command_are_those_of_a_recipe() -> None:
    options = inspect.signature(command).parameters
    for name, field in AugmentConfig.model_fields.items():
        if not field.is_required():
            assert options[name].default == field.default
