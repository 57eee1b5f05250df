"""The quota of older systems; `test_model` has that of version 2 of control groups."""

from pathlib import Path

import pytest

from serving import cores


@pytest.mark.parametrize(("outer", "quota"), [("150000", 1.5), ("-1", 2.0)])
def test_a_quota_of_version_one_counts(tmp_path: Path, outer: str, quota: float) -> None:
    own, inner = tmp_path / "cgroup", tmp_path / "fs" / "cpu" / "outer" / "inner"
    own.write_text("9:memory:/other\n4:cpu,cpuacct:/outer/inner\n0::/\n")
    inner.mkdir(parents=True)
    for folder, microseconds in ((inner, "200000"), (inner.parent, outer)):
        (folder / "cpu.cfs_quota_us").write_text(f"{microseconds}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.cgroup_quota(own, tmp_path / "fs") == quota
