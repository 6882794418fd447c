"""What this machine has, and whether a recipe can run on it. Looks without importing torch unless it has to.

GPUs are read from the driver's `nvidia-smi`, because a torch that does not fit the driver cannot be asked.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from tpshard.recipes.diagnostic import Diagnostic, Exit, Mistakes

if TYPE_CHECKING:
    from tpshard.recipes.schema import Recipe

MIB = 1 << 20
CPU_HINT = "`--device cpu` runs it on the CPU"
_OLDEST_DRIVER: Mapping[int, float] = MappingProxyType({11: 450.80, 12: 525.60, 13: 580.65})
"""CUDA major version to the oldest Linux driver that runs it (CUDA's release notes, minor version compatibility)."""
_KINDS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "a100-40g": ("A100", 40),
        "a100-80g": ("A100", 80),
        "h100-sxm-80g": ("H100", 80),
        "h100-sxm-96g": ("H100", 96),
        "h200": ("H200", 141),
        "h200-x4": ("H200", 141),
        "b200": ("B200", 180),
    }
)
"""Kind of device to what the driver calls it and its memory in GB."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver tells it; memory in bytes."""

    index: int
    name: str
    total: int
    used: int
    capability: str
    mig: bool
    processes: tuple[str, ...] = ()
    """`pid 12 (60 GiB)` of each process on it."""

    @property
    def free(self) -> int:
        return self.total - self.used


@dataclass(frozen=True)
class Driver:
    """The driver and its GPUs. `version` is "" without one; `error` says why there is nothing, if that is known."""

    version: str
    gpus: tuple[Gpu, ...]
    error: str = ""


@dataclass(frozen=True)
class Torch:
    """What torch was built for and what it sees. `cuda` is "" for a CPU build."""

    version: str
    cuda: str
    devices: int
    arches: tuple[str, ...] = ()
    error: str = ""


def probe_driver() -> Driver:
    """Ask the driver; takes milliseconds without one and is given ten seconds with one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Driver("", ())
    columns = "index,name,memory.total,memory.used,compute_cap,mig.mode.current,driver_version,uuid"
    rows, error = _query(tool, f"--query-gpu={columns}")
    if error:
        return Driver("", (), error)
    apps, _ = _query(tool, "--query-compute-apps=gpu_uuid,pid,used_memory")
    users: dict[str, list[str]] = {}
    for row in apps:
        if len(row) == 3:
            size = f" ({_number(row[2]) / 1024:.1f} GiB)" if _number(row[2]) else ""
            users.setdefault(row[0], []).append(f"pid {row[1]}{size}")
    gpus = [
        Gpu(
            int(_number(row[0])),
            row[1],
            int(_number(row[2])) * MIB,
            int(_number(row[3])) * MIB,
            row[4],
            row[5].lower() == "enabled",
            tuple(users.get(row[7], ())),
        )
        for row in rows
        if len(row) == 8
    ]
    return Driver(rows[0][6] if rows and len(rows[0]) == 8 else "", tuple(gpus))


def probe_torch() -> Torch:
    """Import torch and ask it."""
    import warnings

    import torch

    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        except RuntimeError as failed:
            count, error = 0, str(failed).splitlines()[0]
    if not count and not error:
        error = next((str(w.message).splitlines()[0] for w in caught if "CUDA" in str(w.message)), "")
    arches = tuple(torch.cuda.get_arch_list()) if count else ()
    return Torch(torch.__version__, torch.version.cuda or "", count, arches, error)


def gpu_problems(driver: Driver, torch: Torch, wanted: int) -> Iterator[Diagnostic]:
    """What keeps `wanted` GPUs from being used; all of it exit 5."""
    gpus = driver.gpus
    if not gpus:
        why = driver.error or ("the driver has none" if driver.version else "there is no NVIDIA driver")
        yield _wrong(f"{_gpus(wanted)} asked for, and this machine has none", why, CPU_HINT)
        return
    if not torch.cuda:
        fix = f"install a CUDA build of torch; or {CPU_HINT}"
        yield _wrong(f"torch {torch.version} is built for CPUs only", f"{len(gpus)} x {gpus[0].name} here", fix)
        return
    oldest = _OLDEST_DRIVER.get(int(_number(torch.cuda)))
    found = re.match(r"\d+(?:\.\d+)?", driver.version)
    if oldest is not None and found and float(found[0]) < oldest:
        yield _wrong(
            f"the driver {driver.version} is too old for torch's CUDA {torch.cuda}",
            f"CUDA {torch.cuda} needs {oldest:.2f} or newer",
            f"a newer driver, or a torch built for an older CUDA; or {CPU_HINT}",
        )
    elif torch.devices == 0:
        why = torch.error or "see CUDA_VISIBLE_DEVICES, and whether the driver was updated without a restart"
        yield _wrong(f"torch sees none of the {len(gpus)} GPUs", why, f"`nvidia-smi` shows them; or {CPU_HINT}")
    elif torch.devices < wanted:
        yield _wrong(f"{_gpus(wanted)} asked for, and torch sees {torch.devices}", "", "a smaller mesh, or more nodes")
    for gpu in gpus:
        arch = f"sm_{gpu.capability.replace('.', '')}"
        major = gpu.capability.partition(".")[0]
        if torch.arches and not any(a.rstrip("af").startswith(f"sm_{major}") for a in torch.arches):
            message = f"torch {torch.version} has no code for {gpu.name} ({arch})"
            yield _wrong(message, f"it has {', '.join(torch.arches)}", f"a newer torch; or {CPU_HINT}")
        if gpu.mig and wanted > 1:
            yield _wrong(
                f"GPU {gpu.index} ({gpu.name}) is cut into MIG slices, which cannot talk to each other",
                "collectives need whole GPUs",
                f"a mesh of one device, or have MIG switched off on it; or {CPU_HINT}",
            )


def busy(driver: Driver, limit: int | None) -> Iterator[Diagnostic]:
    """GPUs on which somebody else holds memory that a run would need; `limit` is what the run keeps to, in bytes."""
    for gpu in driver.gpus:
        needed = limit if limit is not None else int(gpu.total * 0.9)
        if gpu.processes and gpu.free < needed:
            yield _wrong(
                f"GPU {gpu.index} is busy: {', '.join(gpu.processes)} on it",
                f"{gpu.free / 1024**3:.1f} of {gpu.total / 1024**3:.1f} GiB free",
                f"CUDA_VISIBLE_DEVICES with another, or fsdp.memory_limit: {int(gpu.free / 1024**3 * 0.9)}GiB; "
                f"or {CPU_HINT}",
            )


def kind_problems(kind: str, driver: Driver) -> Iterator[Diagnostic]:
    """Whether the GPUs here are the ones a recipe names."""
    if kind not in _KINDS:
        return
    name, gigabytes = _KINDS[kind]
    for gpu in driver.gpus[:1]:
        if name not in gpu.name or (gpu.total and not 0.85 < gpu.total / (gigabytes * 10**9) < 1.15):
            same = [k for k, (n, size) in _KINDS.items() if n in gpu.name and 0.85 < gpu.total / (size * 10**9) < 1.15]
            fix = f"cluster.device={same[0]}" if same else "describe it in a file: cluster.device=mine.yaml"
            here = f"this machine has {gpu.name} with {gpu.total / 10**9:.0f} GB"
            yield _wrong(f"the recipe is for {kind}, and {here}", "its plan and limits would be off", fix)


def require(recipe: Recipe) -> None:
    """Raises `Mistakes` (exit 5) when this machine is not one of the cluster that the recipe names.

    Without a cluster, or with one of CPUs, every machine will do.
    """
    cluster = recipe.cluster
    if cluster is None or cluster.device == "cpu":
        return
    if cluster.device not in _KINDS:
        from tpshard.devices.read import device

        if device(cluster.device, recipe.where("cluster.device")).kind == "cpu":
            return
    driver = probe_driver()
    found = list(kind_problems(cluster.device, driver)) if driver.gpus else []
    found += gpu_problems(driver, probe_torch() if driver.gpus else Torch("", "", 0), cluster.devices_per_node)
    found += busy(driver, recipe.fsdp.memory_limit)
    if found:
        where = recipe.where("cluster.device")
        raise Mistakes(Diagnostic(d.message, d.exit, where, d.why, d.fix) for d in found)


def _query(tool: str, what: str) -> tuple[Sequence[Sequence[str]], str]:
    try:
        done = subprocess.run(
            [tool, what, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer: {error}"
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        return [], f"nvidia-smi fails: {said[0] if said else f'exit {done.returncode}'}"
    return list(csv.reader(done.stdout.splitlines(), skipinitialspace=True)), ""


def _number(text: str) -> float:
    found = re.match(r"\d+(?:\.\d+)?", text)
    return float(found[0]) if found else 0.0


def _gpus(count: int) -> str:
    return "1 GPU is" if count == 1 else f"{count} GPUs are"


def _wrong(message: str, why: str, fix: str) -> Diagnostic:
    return Diagnostic(message, exit=Exit.MACHINE, why=why, fix=fix)
