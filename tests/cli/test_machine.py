"""Everything that keeps a machine from running a recipe is reported: driver, build, MIG, busy or missing GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from patience import PATIENCE
from tpshard.cli.main import run
from tpshard.devices import machine
from tpshard.devices.machine import Driver, Gpu, Torch, busy, gpu_problems, kind_problems
from tpshard.diagnostics.diagnostic import Exit
from tpshard.recipes.reading.load import loads

GIB = 1 << 30
H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 80 * GIB, 0, "9.0", False)
BUILD = Torch("2.13.0", "12.8", 1, ("sm_80", "sm_90"))


def obstacles(driver: Driver, torch: Torch, devices: int = 1) -> str:
    result = list(gpu_problems(driver, torch, devices))
    assert all(d.exit == Exit.MACHINE for d in result)
    return " | ".join(f"{d.message}: {d.why}: {d.fix}" for d in result)


def test_a_machine_that_fits_has_no_problems() -> None:
    driver = Driver("570.10", (H100,))
    assert obstacles(driver, BUILD) == ""
    assert list(busy(driver, None)) == list(kind_problems("h100-sxm-80g", driver)) == []


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("580.159.04", False),
        ("580.65", False),
        ("580.65.06", False),
        ("590.1", False),
        ("580.9", True),
        ("570.211", True),
    ],
)
def test_parts_of_a_drivers_version_are_whole_numbers(version: str, old: bool) -> None:
    torch = Torch("2.13.0", "13.0", 1, ("sm_90",))
    assert ("too old" in obstacles(Driver(version, (H100,)), torch)) == old


@pytest.mark.parametrize(
    ("driver", "torch", "devices", "words"),
    [
        (Driver("", ()), Torch("2.13.0+cpu", "", 0), 8, "8 GPUs are requested, and this machine has none"),
        (Driver("570.10", ()), BUILD, 1, "the driver has none"),
        (Driver("", (), "nvidia-smi fails: no devices"), BUILD, 1, "nvidia-smi fails"),
        (Driver("570.10", (H100,)), Torch("2.13.0+cpu", "", 0), 1, "torch 2.13.0+cpu is a CPU build"),
        (
            Driver("470.57.02", (H100,)),
            Torch("2.13.0", "12.8", 0),
            1,
            "driver 470.57.02 is too old for torch's CUDA 12.8",
        ),
        (Driver("570.10", (H100,)), Torch("2.13.0", "12.8", 0), 1, "torch sees none of the 1 GPUs"),
        (Driver("570.10", (H100,)), BUILD, 2, "2 GPUs are requested, and torch sees 1"),
        (
            Driver("570.10", (Gpu(0, "NVIDIA B200", 180 * GIB, 0, "10.0", False),)),
            BUILD,
            1,
            "no kernels for NVIDIA B200",
        ),
        (Driver("570.10", (Gpu(0, "H100", 80 * GIB, 0, "9.0", True),)), Torch("2", "12.8", 2), 2, "MIG slices"),
    ],
)
def test_each_obstacle_is_named_with_a_way_out(driver: Driver, torch: Torch, devices: int, words: str) -> None:
    output = obstacles(driver, torch, devices)
    assert words in output
    assert "--device cpu" in output or "smaller mesh" in output


def test_a_busy_device_names_who_is_on_it() -> None:
    gpu = Gpu(3, "H100", 80 * GIB, 60 * GIB, "9.0", False, ("pid 12 (60.0 GiB)",))
    (actual,) = busy(Driver("570", (gpu,)), None)
    assert "GPU 3 is busy: pid 12 (60.0 GiB)" in actual.message
    assert "20.0 of 80.0 GiB free" in actual.why
    assert list(busy(Driver("570", (gpu,)), 10 * GIB)) == []


def test_another_kind_of_device_is_told_with_its_name() -> None:
    (actual,) = kind_problems("a100-80g", Driver("570", (H100,)))
    assert actual.fix == "cluster.device=h100-sxm-80g"
    assert "NVIDIA H100" in actual.message


FAKE = """#!/bin/sh
case "$1" in
  *query-gpu*) echo "0, NVIDIA A100-SXM4-40GB, 40960, 39000, 8.0, Enabled, 470.57.02, GPU-1" ;;
  *compute-apps*) echo "GPU-1, 4242, 38000" ;;
  *) exit 9 ;;
esac
"""


@pytest.fixture
def fake_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(FAKE)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    return tool


def test_the_driver_is_read(fake_driver: Path) -> None:
    actual = machine.probe_driver()
    (gpu,) = actual.gpus
    assert (actual.version, gpu.name, gpu.mig, gpu.capability) == ("470.57.02", "NVIDIA A100-SXM4-40GB", True, "8.0")
    assert (gpu.total, gpu.used, gpu.processes) == (40960 << 20, 39000 << 20, ("pid 4242 (37.1 GiB)",))


def test_training_for_gpus_that_are_not_here_is_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "probe_driver", lambda: Driver("", ()))
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "TPSHARD_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    assert run(["train", "llama3-1b", "data.tokenizer=none"]) == Exit.MACHINE
    printed = capsys.readouterr().err
    assert "this machine has none" in printed and "llama3-1b.yaml:4:" in printed
    assert "--device cpu" in printed or "tpshard plan llama3-1b --dry-run" in printed, "as its memory allows"
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_for_the_cpu_or_for_no_cluster_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "probe_driver", lambda: pytest.fail("asked for a driver"))
    machine.require(loads("model: {preset: tiny}"))
    machine.require(loads("model: {preset: tiny}\ncluster: {device: cpu}"))


def test_the_doctor_reports_everything_once(fake_driver: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json", "--no-collective"]) == Exit.MACHINE  # the fake GPU cannot be used
    report = json.loads(capsys.readouterr().out)
    rooms = [f["room"] for f in report["findings"]]
    assert set(rooms) == {"versions", "devices", "links", "disk", "limits", "ports"}
    bad = [f for f in report["findings"] if f["state"] == "bad"]
    assert not report["ok"] and all(f["name"] == "gpu" and f["fix"] for f in bad)
    assert any("split into MIG slices" in f["value"] for f in report["findings"])
    assert any("pid 4242" in f["value"] for f in report["findings"])


def test_the_doctor_lets_two_processes_sum_and_leaves_none_behind(capsys: pytest.CaptureFixture[str]) -> None:
    from tpshard.cli import doctor

    (actual,) = doctor.collective()
    assert (actual.name, actual.state) == ("gloo", "ok"), actual.value
    assert "sum of two ranks" in actual.value
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "tpshard.devices.pair" not in running


def test_a_collective_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tpshard.cli import doctor

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchlink")
    actual = doctor._pair("gloo", timeout=PATIENCE)
    assert actual.state == "bad" and "failed" in actual.value


def test_a_folder_that_cannot_be_written_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpshard.cli import doctor

    def refusal(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", refusal)
    states = {f.name: f.state for f in doctor.disk()}
    assert states["here"] == states["temporary"] == "bad"


def test_a_port_in_use_is_a_finding() -> None:
    import socket

    from tpshard.cli import doctor

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else holds it already, which is the same
            listener.bind(("127.0.0.1", 8000))
        listener.listen()
        actual = {f.name: f for f in doctor.ports()}
    assert (actual["loopback"].state, actual["serve"].state) == ("ok", "note")
    assert "serve.port" in actual["serve"].fix
