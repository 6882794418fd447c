"""The cores that processes may use are those of their affinity, within every quota of their control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tpshard.parallelism.runtime import cores


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, 4),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),  # a container, whose own group is the root it sees
        ("0::/\n", {"cpu.max": "max 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "800000 100000\n"}, 4),
        ("0::/pods/a one\n", {"pods/cpu.max": "150000 100000\n", "pods/a one/cpu.max": "max 100000\n"}, 1.5),
        ("4:memory:/a\n2:cpu,cpuacct:/b\n",
         {"cpu/b/cpu.cfs_quota_us": "25000\n", "cpu/b/cpu.cfs_period_us": "100000\n"}, 0.25),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)  # fmt: skip
def test_the_smallest_limit_holds(
    membership: str, files: dict[str, str], expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    monkeypatch.setattr(cores, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert cores.usable_cores() == expected
    assert bool(cores.sharing_note(2)) == (expected < 2)
    assert cores.sharing_note(8).startswith(f"8 processes share {expected:g} core")


def test_a_cpu_without_avx2_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, machine, expected in (("DEFAULT", "x86_64", True), ("AVX2", "x86_64", False),
                                          ("DEFAULT", "aarch64", False)):  # fmt: skip
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        monkeypatch.setattr(cores.platform, "machine", lambda name=machine: name)
        assert bool(cores.vectors_note()) == expected
