"""How many processor cores this process may really use: its affinity, cut by the quota of its control group."""

import math
import os
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def available_cores() -> int:
    """Return the cores this process may use, at least 1; a quota of 1.5 cores counts as 2.

    The host's count is no guide: a container limited to 2 of 64 cores that starts 64 threads is slower than with 2.
    """
    affinity = len(os.sched_getaffinity(0))
    quota = cgroup_quota(_OWN_CGROUP, _CGROUP_ROOT)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def cgroup_quota(own: Path, root: Path) -> float | None:
    """Return the smallest quota, in cores, from the own control group up to the top one; None if there is none.

    `own` is a file like /proc/self/cgroup and `root` the mount point of the hierarchies: that of version 2 itself, and
    version 1's of processors in `cpu`. A container usually sees its own group as "/", so the top one counts as well.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        top = root / "cpu" if "cpu" in controllers.split(",") else root
        if top != root or not controllers:
            folder = top / group.lstrip("/")
            quotas += [_quota(parent) for parent in (folder, *folder.parents) if parent.is_relative_to(top)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        return None if quota in ("max", "-1") else int(quota) / int(period)
    return None
