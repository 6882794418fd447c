"""The CPU cores that processes here may use, those of their affinity within the quota of their control group, and what
makes them slow."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

CONTROL_GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> float:
    """The number of cores; a container's limit may be a fraction of one."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(affinity), *_quotas()])


def sharing_note(processes: int) -> str:
    """A sentence for the user where processes on the CPU have less than a core each; "" where they have."""
    cores = usable_cores()
    if processes <= cores:
        return ""
    share = "a process has" if processes == 1 else f"{processes} processes share"
    return f"{share} {cores:g} core{'s' * (cores != 1)} of this host, which is slower than a core for each"


def vectors_note() -> str:
    """A sentence for the user where torch computes without vector instructions that all its kernels use; else ""."""
    import torch

    wide = platform.machine() not in ("x86_64", "AMD64") or torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    return "" if wide else "torch computes without AVX2 here, which is slower"


def _quotas() -> Iterator[float]:
    """The cores that each control group of this process allows, for those with a limit (versions 2 and 1)."""
    for folder in {CONTROL_GROUPS, CONTROL_GROUPS / "cpu", *_groups()}:
        older = _read(folder / "cpu.cfs_quota_us") + _read(folder / "cpu.cfs_period_us")
        quota = (_read(folder / "cpu.max") or older).split()
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
            yield int(quota[0]) / int(quota[1])


def _groups() -> Iterator[Path]:
    """The folders of this process's groups and of those above; none where a container shows its own as the root."""
    for line in _read(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CONTROL_GROUPS / "cpu" if controllers else CONTROL_GROUPS
        parts = path.strip("/").split("/")
        yield from (root.joinpath(*parts[:count]) for count in range(len(parts) + 1))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
