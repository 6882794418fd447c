"""`tpshard doctor` reports a GPU, and writes a device file that can be priced."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from commands import tpshard
from tpshard.devices import machine
from tpshard.devices.read import device as read

pytestmark = pytest.mark.gpu


def test_the_driver_and_torch_see_the_same() -> None:
    driver, torch_probe = machine.probe_driver(), machine.probe_torch()
    assert driver.version and len(driver.gpus) >= torch_probe.devices == torch.cuda.device_count() > 0
    properties = torch.cuda.get_device_properties(0)
    assert driver.gpus[0].name == properties.name
    assert abs(driver.gpus[0].total / properties.total_memory - 1) < 0.05
    assert list(machine.gpu_problems(driver, torch_probe, 1)) == []
    assert list(machine.gpu_problems(driver, torch_probe, len(driver.gpus) + 1))


def test_nothing_is_bad(tmp_path: Path) -> None:
    done = tpshard(tmp_path, "doctor")
    assert torch.cuda.get_device_name() in done.stdout, done.stdout + done.stderr


def test_a_measured_device_file_is_plausible_and_plans(tmp_path: Path) -> None:
    done = tpshard(tmp_path, "doctor", "--measure", "here.yaml")
    assert done.returncode == 0, done.stderr
    actual = read(str(tmp_path / "here.yaml"))
    assert (
        actual.kind == "gpu" and abs(actual.memory_bytes / torch.cuda.get_device_properties(0).total_memory - 1) < 0.01
    )
    shares = astuple(actual.efficiency)
    assert all(0 < share <= 1 for share in shares), shares  # small where others use the device
    assert 1e-7 < actual.overhead.eager_op_s < 1e-3, actual.overhead
    planned = tpshard(tmp_path, "plan", "quickstart", "cluster.device=here.yaml", "mesh={fsdp: 1}", "--dry-run")
    assert planned.returncode == 0 and "FITS" in planned.stdout, planned.stderr
