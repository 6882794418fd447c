"""Everything that keeps a machine from running a recipe is reported: driver, build, MIG, busy or missing GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import PATIENCE
from tpshard.cli.main import run
from tpshard.devices import machine
from tpshard.devices.machine import Driver, Gpu, Torch, busy, gpu_problems, kind_problems
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.recipes.reading.load import loads

ROOT = Path(__file__).parents[2]
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


A10 = Gpu(1, "NVIDIA A10", 22 * GIB, 0, "8.6", False, uuid="GPU-b7")
V100 = Gpu(0, "Tesla V100-SXM2-32GB", 32 * GIB, 0, "7.0", False)
CLUSTER = "cluster: {device: DEVICE, devices_per_node: N}\nmesh: {fsdp: N}\nbatch: {global_sequences: 4}\n"


@pytest.mark.parametrize(("gpus", "file", "count", "words", "more"), [
    ((V100,), "mine.yaml", 1, "Tesla V100-SXM2-32GB does not multiply bf16", ""),
    ((A10, A10), "mine.yaml", 2, "NVIDIA A10 does not multiply fp8", "model: {dtype: fp8}"),
    ((A10,), "h100-sxm-80g", 1, "the recipe is for h100-sxm-80g, and this machine has NVIDIA A10 with 24 GB", ""),
    ((A10,), "large.yaml", 1, "large has 79.1 GiB, and this machine's NVIDIA A10 22.0", ""),
    ((H100, A10), "mine.yaml", 2, "GPUs of two kinds in one mesh: 0 NVIDIA H100 80GB HBM3, 1 NVIDIA A10", ""),
    ((replace(H100, mig=True),), "h100-sxm-80g", 1, "GPU 0 (NVIDIA H100 80GB HBM3) is split into MIG slices", ""),
    ((replace(A10, mig=True),) * 2, "mine.yaml", 2, "is split into MIG slices, which cannot communicate", ""),
    ((replace(A10, used=15 * GIB),), "mine.yaml", 1, "GPU 1 is too full, of processes unseen here", ""),
    ((replace(A10, used=15 * GIB, processes=("pid 3",)),), "mine.yaml", 1, "GPU 1 is busy: pid 3 on it", ""),
    ((H100,), "h100-sxm-80g", 4, "4 GPUs are requested, and torch sees 1", ""),
])  # fmt: skip
def test_a_run_that_does_not_suit_the_gpus_is_5_in_a_sentence(
    gpus: tuple[Gpu, ...], file: str, count: int, words: str, more: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shipped = (ROOT / "devices" / "h100-sxm-80g.yaml").read_text()
    (tmp_path / "large.yaml").write_text(shipped.replace("name: h100-sxm-80g", "name: large"))
    (tmp_path / "mine.yaml").write_text(shipped.replace("79.1 GiB", "20 GiB").replace("h100-sxm-80g", "mine"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    build = Torch("2.13.0", "12.8", len(gpus), ("sm_70", "sm_80", "sm_90"))
    monkeypatch.setattr(machine, "probe_driver", lambda: Driver("570.10", gpus))
    monkeypatch.setattr(machine, "probe_torch", lambda: build)
    text = (CLUSTER + (more or "model: {dtype: bf16}")).replace("DEVICE", file).replace("N}", f"{count}}}")
    with pytest.raises(Mistakes) as raised:
        machine.require(loads(text.replace("model: {", "model: {preset: tiny, ")))
    (mistake,) = raised.value.diagnostics
    assert mistake.exit == Exit.MACHINE and words in mistake.message and mistake.fix
    assert mistake.where is not None and mistake.where.line == 1


def test_gpus_that_a_run_does_not_use_are_not_its_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    busy_one = replace(H100, index=2, used=70 * GIB, processes=("pid 3",))
    driver = Driver("570.10", (A10, H100, busy_one))
    assert driver.used_by(1, {}).gpus == (A10,) and driver.used_by(9, {}).gpus == driver.gpus
    assert driver.used_by(2, {"CUDA_VISIBLE_DEVICES": "2, GPU-b,0"}).gpus == (busy_one, A10)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(machine, "probe_driver", lambda: driver)
    monkeypatch.setattr(machine, "probe_torch", lambda: BUILD)
    recipe = loads("model: {preset: tiny}\ncluster: {device: h100-sxm-80g, devices_per_node: 1}\nmesh: {fsdp: 1}")
    machine.require(recipe)
    assert machine.require_server(recipe, 1, "bf16") == 80 * GIB
    with pytest.raises(Mistakes, match="2 GPUs are requested, and torch sees 1"):
        machine.require_server(recipe, 2, "bf16")


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


@pytest.mark.parametrize(
    ("seen", "gpus", "words"),
    [
        ("0", (H100,), ""),
        ("0,1", tuple(replace(H100, index=i) for i in range(2)), ""),
        ("0", (replace(H100, used=79 * GIB),), "too full"),
        ("0", (replace(H100, name="NVIDIA A100-SXM4-80GB", capability="8.0"),), "the recipe is for h100-sxm-80g"),
        ("", (), "this machine has none"),
    ],
)
def test_a_worker_of_another_launcher_is_refused_before_anything_is_read(
    seen: str, gpus: tuple[Gpu, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two tasks sees one GPU of its own, or both."""
    from tpshard.cli.shared import worker_errors
    from tpshard.parallelism.runtime.place import WorkerPlace

    recipe = loads("model: {preset: tiny}\nmesh: {fsdp: 2}\ncluster: {device: h100-sxm-80g, devices_per_node: 2}")
    monkeypatch.setattr(machine, "probe_driver", lambda: Driver("570.10", gpus))
    monkeypatch.setattr(machine, "probe_torch", lambda: replace(BUILD, devices=len(gpus)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    place = WorkerPlace(1, 2, 1, 2, "env:", "torchrun")
    if not words:
        assert worker_errors.device_of_worker(recipe, place) == "cuda"
        return
    with pytest.raises(Mistakes, match=words) as refused:
        worker_errors.device_of_worker(recipe, place)
    assert refused.value.exit == Exit.MACHINE


def test_two_workers_on_one_gpu_are_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist
    from tpshard.parallelism.runtime import context
    from tpshard.parallelism.runtime.messages import WorkerFault
    from tpshard.parallelism.runtime.place import WorkerPlace

    store, one = dist.HashStore(), SimpleNamespace(uuid="GPU-1", name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: one)
    places = [WorkerPlace(rank, 2, rank, 2, "env:", "torchrun") for rank in range(2)]
    context._claim(store, places[0], torch.device("cuda", 0))
    with pytest.raises(WorkerFault, match=r"rank 1 .* have the same GPU \(NVIDIA H100") as refused:
        context._claim(store, places[1], torch.device("cuda", 0))
    assert refused.value.exit == Exit.MACHINE


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


LEGEND = """

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
ONE_GPU = """\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \t0-15\t0\t\tN/A
"""
ONE_BESIDE_A_CARD = """\t\x1b[4mGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPXB\t0-15\t0\t\tN/A
NIC0\tPXB\t X \t\t\t\t
"""
NVLINK = """\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPXB\tSYS\t0-51,104-155\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPIX\t52-103,156-207\t1\t\tN/A
NIC0\tPXB\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tPIX\tSYS\t X \t\t\t\t
"""
PCIE = """\tGPU0\tGPU1\tGPU2\tmlx5_0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPHB\tSYS\tNODE\t0-11\t0
GPU1\tPHB\t X \tSYS\tNODE\t0-11\t0
GPU2\tSYS\tSYS\t X \tSYS\t12-23\t1
mlx5_0\tNODE\tNODE\tSYS\t X \t\t
"""


@pytest.mark.parametrize(("topology", "kinds"), [
    (ONE_GPU, set()), (ONE_BESIDE_A_CARD, set()), (NVLINK, {"NV18"}), (PCIE, {"PHB", "SYS"}), ("", set()),
])  # fmt: skip
def test_links_between_gpus_are_read_beside_cards_and_affinities(topology: str, kinds: set[str]) -> None:
    from tpshard.cli import doctor

    assert doctor.gpu_links(topology + LEGEND) == kinds


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
