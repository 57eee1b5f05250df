"""The description of a model, and the cores that it is given."""

from collections.abc import Callable
from pathlib import Path

import pytest

from serving import ModelError, Queue, ServedModel, cores


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "a/b"}, "name 'a/b' must be made of letters"),
        ({"name": ""}, "it names a folder"),
        ({"labels": ("one",)}, "needs 2 or more, all different, and a regression none"),
        ({"labels": ("a", "a")}, "all different"),
        ({"labels": ("a", "b\nc")}, "must be one non-empty line"),
        ({"labels": ("a", " ")}, "must be one non-empty line"),
        ({"max_tokens": 2}, r"max_tokens is 2; \[CLS\], and for each text a word and \[SEP\], need 3"),
        ({"max_tokens": 4, "pair": True, "warmup_texts": ()}, "max_tokens is 4; .* need 5"),
        ({"pair": True}, "warm-up text 'a good film' must be two texts: pair is True"),
        ({"warmup_texts": (("a", "b"),)}, r"warm-up text \('a', 'b'\) must be one text: pair is False"),
        ({"max_batch_size": 0}, "max_batch_size is 0; it must be at least 1"),
        ({"instances": 0}, "instances is 0"),
        ({"intra_op_threads": -1}, "intra_op_threads is -1"),
    ],
)
def test_wrong_field_is_named_with_its_value(
    make_model: Callable[..., ServedModel], fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        make_model(**fields)


@pytest.mark.parametrize("field", ["max_delay_us", "max_requests", "timeout_ms"])
def test_queue_refuses_negative_numbers(field: str) -> None:
    with pytest.raises(ModelError, match=rf"queue.{field} is -1"):
        Queue(**{field: -1})


@pytest.mark.parametrize(
    ("available", "instances", "threads", "expected"),
    [
        (2, None, None, (2, 1)),
        (16, None, None, (8, 2)),
        (1, None, None, (1, 1)),
        (8, 2, None, (2, 4)),
        (8, None, 4, (2, 4)),
        (2, None, 4, (1, 4)),
        (2, 3, None, (3, 1)),
        (2, 3, 5, (3, 5)),
    ],
)
def test_cores_are_shared_among_instances(
    monkeypatch: pytest.MonkeyPatch,
    make_model: Callable[..., ServedModel],
    available: int,
    instances: int | None,
    threads: int | None,
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr("serving.model.available_cores", lambda: available)
    assert make_model(instances=instances, intra_op_threads=threads).shares() == expected


def test_the_cores_of_another_machine_can_be_given(make_model: Callable[..., ServedModel]) -> None:
    assert make_model(cores=32, instances=None, intra_op_threads=None).shares() == (8, 4)
    with pytest.raises(ModelError, match="cores is 0; it must be at least 1"):
        make_model(cores=0)


def test_smallest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    inner = tmp_path / "fs" / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "fs" / "cpu.max").write_text("400000 100000\n")
    assert cores.cgroup_quota(own, tmp_path / "fs") == 1.5


@pytest.mark.parametrize("content", ["4:cpu:/old\n", "0::/absent\n"])
def test_no_quota_without_version_two_or_file(tmp_path: Path, content: str) -> None:
    own = tmp_path / "cgroup"
    own.write_text(content)
    assert cores.cgroup_quota(own, tmp_path) is None


def test_no_quota_without_control_groups(tmp_path: Path) -> None:
    assert cores.cgroup_quota(tmp_path / "missing", tmp_path) is None


def test_quota_cuts_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for quota, expected in ((None, 8), (1.5, 2), (0.1, 1), (20.0, 8)):
        monkeypatch.setattr(cores, "cgroup_quota", lambda *_, quota=quota: quota)
        assert cores.available_cores() == expected
