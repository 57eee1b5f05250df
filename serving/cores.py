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
    """Return the smallest `cpu.max` quota, in cores, from the own control group up to `root`; None if there is none.

    `own` is a file like /proc/self/cgroup and `root` the mount point of the version 2 hierarchy. A container usually
    sees its own group as "/", so the file at `root` counts as well.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    groups = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    if not groups:
        return None
    folder = root / groups[0].lstrip("/")
    quotas = [_quota(parent / "cpu.max") for parent in (folder, *folder.parents) if parent.is_relative_to(root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(file: Path) -> float | None:
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)
