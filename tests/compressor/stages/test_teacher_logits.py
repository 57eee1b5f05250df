"""What a teacher is asked before its student is trained: by whom, what is kept, and on how many tokens."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from compressor.dataset import Encoded, encode
from compressor.stages import distill as stage
from compressor.stages.distill import _projection_rows, teacher_logits
from compressor.training import Tensors
from compressor.world import World
from tests import tiny

WORLD = World(device=torch.device("cpu"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Encoded:
    return tiny.encoded(tmp_path_factory.mktemp("rows"), train=192)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.lively(tiny.bert())


def cached(model: Any, rows: Encoded, folder: Path) -> Any:
    return asked(model, rows, None, folder)


def asked(model: Any, rows: Encoded, row_S: Any, folder: Path, world: World = WORLD) -> Any:
    file, scratch = folder / "teacher.logits.npy", folder / "scratch"
    return teacher_logits(model, rows, row_S, "fp32", world=world, file=file, scratch=scratch)


def test_cached_logits_are_the_teachers(model: Any, rows: Encoded, tmp_path: Path) -> None:
    found = cached(model, rows, tmp_path)
    with torch.no_grad():
        for row in range(0, len(rows), 17):
            alone = Tensors.of(rows.batch(np.array([row])), WORLD.device)
            expected = model(input_ids=alone.input_ids_BS, attention_mask=alone.mask_BS).logits
            np.testing.assert_allclose(found[row], expected[0].numpy(), atol=1e-5)


def test_cached_logits_of_pairs_know_the_second_text(tmp_path: Path) -> None:
    task = tiny.pair_task()
    model = tiny.lively(tiny.bert(task=task))
    corpus, tokenizer = tiny.examples(tmp_path / "corpus", task=task), tiny.tokenizer(tmp_path / "tokenizer")
    rows = encode(corpus, "train", tokenizer, tiny.MAX_TOKENS, cache=tmp_path / "cache")
    found = cached(model, rows, tmp_path)
    one = Tensors.of(rows.batch(np.array([3])), WORLD.device)
    assert one.segment_BS.any()
    with torch.no_grad():
        expected = model(input_ids=one.input_ids_BS, attention_mask=one.mask_BS, token_type_ids=one.segment_BS).logits
    np.testing.assert_allclose(found[3], expected[0].numpy(), atol=1e-5)


def test_cached_logits_are_worked_out_once_and_stay_on_the_disk(model: Any, rows: Encoded, tmp_path: Path) -> None:
    found = cached(model, rows, tmp_path)
    again = cached(None, rows, tmp_path)
    assert np.array_equal(found, again)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["teacher.logits.npy"]
    for logits_NC in (found, again):
        assert isinstance(logits_NC, np.memmap)
        assert not logits_NC.flags.writeable


def test_logits_of_some_rows_are_those_of_all(model: Any, rows: Encoded, tmp_path: Path) -> None:
    some = np.array([1, 4, 9])
    found = asked(model, rows, some, tmp_path / "some")
    every = cached(model, rows, tmp_path)
    assert_close(torch.tensor(found[some]), torch.tensor(every[some]))
    assert not np.delete(found, some, axis=0).any()


@dataclass
class Cut:
    """A teacher that dies after some batches."""

    model: Any
    left: int

    def __post_init__(self) -> None:
        self.config = self.model.config

    def __call__(self, **inputs: Any) -> Any:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return self.model(**inputs)


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize(("batches", "repeated"), [(0, 0), (2, 2), (3, 0), (7, 1)])
def test_interrupted_logits_are_gone_on_from_and_end_the_same(
    model: Any, rows: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, some: bool, batches: int, repeated: int
) -> None:
    monkeypatch.setattr(stage, "TEACHER_BATCH", 8)
    monkeypatch.setattr(stage, "LOGIT_ROWS", 24)
    row_S = np.arange(1, len(rows), 2) if some else None
    total = (96 if some else 192) // 8
    whole = asked(model, rows, row_S, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        asked(Cut(model, batches), rows, row_S, tmp_path / "cut")
    assert not (tmp_path / "cut" / "teacher.logits.npy").exists()
    again = Cut(model, total)
    assert np.array_equal(asked(again, rows, row_S, tmp_path / "cut"), whole)
    assert again.left == batches - repeated
    assert not list((tmp_path / "cut" / "scratch").iterdir())


def test_unfinished_logits_without_a_note_are_worked_out_anew(model: Any, rows: Encoded, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "teacher.logits.npy").write_bytes(b"cut")
    assert np.isfinite(cached(model, rows, tmp_path)).all()


@pytest.mark.parametrize("kept_bytes", [0, 20, -40])
def test_damaged_logits_are_named_and_worked_out_anew(
    model: Any, rows: Encoded, tmp_path: Path, kept_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole, file = np.array(cached(model, rows, tmp_path)), tmp_path / "teacher.logits.npy"
    cut = file.read_bytes()[:kept_bytes]
    file.unlink()
    file.write_bytes(cut)
    assert np.array_equal(cached(model, rows, tmp_path), whole)
    assert f"{file} is damaged and is made again" in caplog.text


def test_a_full_disk_is_found_out_before_logits_are_written(
    model: Any, rows: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[int] = []

    def refuse(descriptor: int, offset: int, size: int) -> None:
        asked_for.append(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    with pytest.raises(OSError, match="No space left on device"):
        cached(Cut(model, 0), rows, tmp_path)
    assert asked_for == [(tmp_path / "scratch" / "teacher.logits.npy").stat().st_size]


@dataclass
class Meeting:
    """Where threads that stand for processes meet."""

    gate: threading.Barrier
    told: dict[int, Any] = field(default_factory=dict)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.told[rank] = value
        self.gate.wait(20)
        found = [self.told[number] for number in range(self.gate.parties)]
        self.gate.wait(20)
        return found


@dataclass(frozen=True, kw_only=True)
class Thread(World):
    meeting: Meeting

    def barrier(self) -> None:
        self.meeting.exchange(self.rank, None)

    def broadcast(self, value: Any) -> Any:
        return self.meeting.exchange(self.rank, value)[0]

    def sum(self, array: Any) -> Any:
        return np.sum(self.meeting.exchange(self.rank, array), axis=0)


def test_only_the_leader_writes_and_looks_for_what_all_find_out_together(
    model: Any, rows: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "TEACHER_BATCH", 8)
    monkeypatch.setattr(stage, "LOGIT_ROWS", 100)
    whole = cached(model, rows, tmp_path / "whole")
    meeting, writers = Meeting(threading.Barrier(3)), list[str]()
    file = tmp_path / "together" / "teacher.logits.npy"
    looks: list[tuple[str, bool]] = []
    open_memmap, is_file = stage.open_memmap, Path.is_file

    def opened(*arguments: Any, **named: Any) -> Any:
        writers.append(threading.current_thread().name)
        return open_memmap(*arguments, **named)

    def looked(path: Path) -> bool:
        found = is_file(path)
        if path == file:
            looks.append((threading.current_thread().name, found))
        return found

    monkeypatch.setattr(stage, "open_memmap", opened)
    monkeypatch.setattr(Path, "is_file", looked)

    def process(rank: int) -> Any:
        threading.current_thread().name = str(rank)
        world = Thread(rank=rank, size=3, device=WORLD.device, meeting=meeting)
        return asked(model, rows, None, file.parent, world)

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(process, range(3)))
    assert all(np.array_equal(logits_NC, whole) for logits_NC in found)
    assert writers == ["0"]
    # A network file system remembers for a while that a file was not there.
    assert {name for name, there in looks if not there} == {"0"}


# What a projection is fitted on.


def test_short_texts_all_take_part_in_a_projection(rows: Encoded) -> None:
    found = _projection_rows(rows, seed=7)
    drawn = np.random.default_rng(7).permutation(len(rows))
    assert found.tolist() == drawn[np.argsort(rows.lengths(drawn), kind="stable")].tolist()


def test_few_tokens_of_long_texts_are_held(rows: Encoded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "PROJECTION_TOKENS", 200)
    found = _projection_rows(rows, seed=7)
    drawn = np.random.default_rng(7).permutation(len(rows))[: len(found)]
    assert 200 - tiny.MAX_TOKENS < rows.lengths(found).sum() <= 200
    assert sorted(found) == sorted(drawn)
