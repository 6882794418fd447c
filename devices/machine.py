"""Detects this machine's GPUs, and checks whether a recipe can run on it. Imports torch only when needed.

GPUs are read from the driver's `nvidia-smi`, because a torch that does not match the driver cannot report them.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, Source

if TYPE_CHECKING:
    from tpshard.recipes.keys.schema import Recipe

MIB = 1 << 20
CPU_HINT = "`--device cpu` runs it on the CPU"
MANY = 8
"""Devices up to which a run on one machine's CPU is offered in their place."""
BYTES_PER_PARAMETER = 16
"""fp32 parameter, gradient and Adam's two moments: what training on the CPU takes at least."""
_OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""The oldest Linux driver for each CUDA major version (CUDA's release notes, minor version compatibility)."""
_NEEDS = {"bf16": (8, 0), "fp8": (8, 9)}
"""The least compute capability that multiplies a dtype."""
_KINDS = {
    "a100-40g": ("A100", 40),
    "a100-80g": ("A100", 80),
    "h100-sxm-80g": ("H100", 80),
    "h100-sxm-96g": ("H100", 96),
    "h200": ("H200", 141),
    "h200-x4": ("H200", 141),
    "b200": ("B200", 180),
    "b300": ("B300", 288),
    "gb200": ("GB200", 186),
    "gb300": ("GB300", 288),
    "rtx-4090": ("RTX 4090", 24),
    "rtx-a6000": ("RTX A6000", 48),
    "rtx-6000-ada": ("RTX 6000 Ada", 48),
    "a100-pcie-80g": ("A100", 80),
    "a800": ("A800", 80),
    "h20": ("H20", 96),
    "h20-141g": ("H20", 141),
    "l4": ("L4", 24),
    "l40s": ("L40S", 48),
}
"""For each kind of device, the driver's name for it and its memory in GB."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it; memory in bytes."""

    index: int
    name: str
    total: int
    used: int
    capability: str
    mig: bool
    processes: tuple[str, ...] = ()
    """`pid 12 (60 GiB)` for each process on the GPU."""
    uuid: str = ""

    @property
    def free(self) -> int:
        """Free memory in bytes."""
        return self.total - self.used


@dataclass(frozen=True)
class Driver:
    """This machine's NVIDIA driver and GPUs. `version` is "" without a driver; `error` says why there are none, if
    known."""

    version: str
    gpus: tuple[Gpu, ...]
    error: str = ""

    def used_by(self, count: int, env: Mapping[str, str] = os.environ) -> Driver:
        """The driver with the GPUs that `count` processes would use: the first of those in CUDA_VISIBLE_DEVICES."""
        named = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        chosen = [gpu for name in named for gpu in self.gpus if name == str(gpu.index) or gpu.uuid.startswith(name)]
        return replace(self, gpus=tuple(chosen or self.gpus)[:count])


@dataclass(frozen=True)
class Torch:
    """The CUDA version torch was built for ("" for a CPU build), and the GPUs it sees."""

    version: str
    cuda: str
    devices: int
    arches: tuple[str, ...] = ()
    error: str = ""


def probe_driver() -> Driver:
    """Queries the driver, with a timeout of ten seconds; returns at once if there is none."""
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
            row[7],
        )
        for row in rows
        if len(row) == 8
    ]
    return Driver(rows[0][6] if rows and len(rows[0]) == 8 else "", tuple(gpus))


def probe_torch() -> Torch:
    """Imports torch, and asks it for its CUDA version and the GPUs that it sees."""
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


def gpu_problems(driver: Driver, torch: Torch, required: int, otherwise: str = "") -> Iterator[Diagnostic]:
    """The reasons why `required` GPUs cannot be used, each with exit 5. otherwise: the fix where there are none."""
    gpus = driver.gpus
    if not gpus:
        why = driver.error or ("the driver has none" if driver.version else "there is no NVIDIA driver")
        fix = otherwise or (CPU_HINT if required <= MANY else "run it where they are")
        yield _wrong(f"{_gpus(required)} requested, and this machine has none", why, fix)
        return
    if not torch.cuda:
        fix = f"install a CUDA build of torch; or {CPU_HINT}"
        yield _wrong(f"torch {torch.version} is a CPU build", f"this machine has {len(gpus)} x {gpus[0].name}", fix)
        return
    oldest = _OLDEST_DRIVER.get(int(_number(torch.cuda)))
    version = tuple(map(int, re.findall(r"\d+", driver.version)))  # 580.159 is newer than 580.65
    if oldest is not None and version and version < oldest:
        yield _wrong(
            f"the driver {driver.version} is too old for torch's CUDA {torch.cuda}",
            f"CUDA {torch.cuda} needs {oldest[0]}.{oldest[1]} or newer",
            f"install a newer driver, or a torch built for an older CUDA; or {CPU_HINT}",
        )
    elif torch.devices == 0:
        why = torch.error or "check CUDA_VISIBLE_DEVICES, and whether the driver was updated without a restart"
        yield _wrong(f"torch sees none of the {len(gpus)} GPUs", why, f"`nvidia-smi` shows them; or {CPU_HINT}")
    elif torch.devices < required:
        yield _wrong(
            f"{_gpus(required)} requested, and torch sees {torch.devices}", "", "use a smaller mesh or more nodes"
        )
    for gpu in {gpu.name: gpu for gpu in gpus}.values():
        arch = f"sm_{gpu.capability.replace('.', '')}"
        major = gpu.capability.partition(".")[0]
        if torch.arches and not any(a.rstrip("af").startswith(f"sm_{major}") for a in torch.arches):
            message = f"torch {torch.version} has no kernels for {gpu.name} ({arch})"
            yield _wrong(message, f"it has {', '.join(torch.arches)}", f"install a newer torch; or {CPU_HINT}")
    if len({gpu.name for gpu in gpus[:required]}) > 1:
        yield _wrong(
            f"GPUs of two kinds in one mesh: {', '.join(f'{gpu.index} {gpu.name}' for gpu in gpus[:required])}",
            "the slower kind would decide how long a step takes, and the smaller memory what fits",
            "CUDA_DEVICE_ORDER=PCI_BUS_ID and the numbers of one kind in CUDA_VISIBLE_DEVICES",
        )
    if required > 1 and (sliced := [gpu for gpu in gpus[:required] if gpu.mig]):
        numbers = ", ".join(str(gpu.index) for gpu in sliced)
        yield _wrong(
            f"GPU {numbers} ({sliced[0].name}) is split into MIG slices, which cannot communicate",
            "collectives need whole GPUs",
            f"use a mesh of one device, or switch MIG off; or {CPU_HINT}",
        )


def busy(driver: Driver, limit: int | None) -> Iterator[Diagnostic]:
    """A mistake per GPU that other processes fill too much for a run, also those that a container does not show.
    `limit`: the run's memory limit in bytes."""
    for gpu in driver.gpus:
        share = 0.9 if gpu.processes else 0.5  # a screen takes a little, without a process
        needed = limit if limit is not None else int(gpu.total * share)
        if gpu.total and gpu.free < needed:
            users = f"busy: {', '.join(gpu.processes)} on it" if gpu.processes else "too full, of processes unseen here"
            yield _wrong(
                f"GPU {gpu.index} is {users}",
                f"{gpu.free / 1024**3:.1f} of {gpu.total / 1024**3:.1f} GiB free",
                f"set CUDA_VISIBLE_DEVICES to another, or fsdp.memory_limit: {int(gpu.free / 1024**3 * 0.9)}GiB; "
                f"or {CPU_HINT}",
            )


def dtype_problems(dtypes: Collection[str], driver: Driver) -> Iterator[Diagnostic]:
    """A mistake per dtype that the GPUs do not multiply."""
    for dtype in _NEEDS:
        for gpu in driver.gpus[:1] if dtype in dtypes else ():
            if tuple(map(int, re.findall(r"\d+", gpu.capability))) < _NEEDS[dtype]:
                needed = ".".join(map(str, _NEEDS[dtype]))
                yield _wrong(
                    f"{gpu.name} does not multiply {dtype}",
                    f"it has compute capability {gpu.capability}, and {dtype} needs {needed}",
                    "dtype: bf16" if dtype == "fp8" else f"dtype: fp32; or {CPU_HINT}",
                )


def size_problems(name: str, memory: int, driver: Driver) -> Iterator[Diagnostic]:
    """A mistake if the GPUs have less memory than a device file says."""
    for gpu in driver.gpus[:1]:
        if gpu.total and gpu.total < memory:
            yield _wrong(
                f"{name} has {memory / 1024**3:.1f} GiB, and this machine's {gpu.name} {gpu.total / 1024**3:.1f}",
                "its plan and limits would be off",
                "`tpshard doctor --measure mine.yaml`, and cluster.device=mine.yaml",
            )


def kind_problems(kind: str, driver: Driver) -> Iterator[Diagnostic]:
    """A mistake if the GPUs are not of the kind that the recipe names."""
    if kind not in _KINDS:
        return
    for gpu in driver.gpus[:1]:
        if gpu.mig and len(driver.gpus) == 1:
            yield _wrong(
                f"the recipe is for {kind}, and GPU {gpu.index} ({gpu.name}) is split into MIG slices",
                "a slice has a part of its memory and rates",
                "describe the slice in a file: cluster.device=mine.yaml; or switch MIG off",
            )
        sizes = {k: size for k, (name, size) in _KINDS.items() if re.search(rf"\b{name}\b", gpu.name)}
        same = [k for k, size in sizes.items() if not gpu.total or 0.85 < gpu.total / (size * 10**9) < 1.15]
        if kind not in same:
            fix = f"cluster.device={same[0]}" if same else "describe it in a file: cluster.device=mine.yaml"
            present = f"this machine has {gpu.name} with {gpu.total / 10**9:.0f} GB"
            yield _wrong(f"the recipe is for {kind}, and {present}", "its plan and limits would be off", fix)


def require(recipe: Recipe, workers: int | None = None) -> None:
    """Raises `Mistakes` (exit 5) when this machine does not match the recipe's cluster.

    workers: how many share the GPUs that this process sees; None for all of the cluster's on one host. Without a
    cluster, or with a CPU cluster, every machine matches.
    """
    cluster = recipe.cluster
    if cluster is None or cluster.device == "cpu":
        return
    described = None
    if cluster.device not in _KINDS:
        from tpshard.devices.read import device

        described = device(cluster.device, recipe.where("cluster.device"))
        if described.kind == "cpu":
            return
    count = cluster.devices_per_node if workers is None else workers
    driver = probe_driver().used_by(count)
    problems = list(kind_problems(cluster.device, driver))
    problems += size_problems(described.name, described.memory_bytes, driver) if described else []
    problems += dtype_problems({str(recipe.model.dtype), str(recipe.fsdp.param_dtype)}, driver)
    torch = probe_torch() if driver.gpus else Torch("", "", 0)
    problems += gpu_problems(driver, torch, count, "" if driver.gpus else without_gpus(recipe))
    problems += busy(driver, recipe.fsdp.memory_limit)
    _raise(recipe.where("cluster.device"), problems)


def require_server(recipe: Recipe, ranks: int, dtype: str) -> int:
    """The free bytes of the fullest of the GPUs on which a recipe's server would have its ranks, asked of the driver:
    a process that asks torch takes a part of the memory. Raises `Mistakes` (exit 5) where they cannot be used."""
    driver = probe_driver().used_by(ranks)
    problems = [*dtype_problems({dtype}, driver), *gpu_problems(driver, probe_torch(), ranks)]
    _raise(recipe.where("serve.mesh"), problems)
    if any(gpu.mig for gpu in driver.gpus):  # the driver does not say which slice is visible
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return min(gpu.free for gpu in driver.gpus)


def _raise(where: Source, problems: Sequence[Diagnostic]) -> None:
    if problems:
        raise Mistakes(Diagnostic(d.message, d.exit, where, d.why, d.fix) for d in problems)


def without_gpus(recipe: Recipe) -> str:
    """What can be done with a recipe for GPUs on a machine without: `--device cpu` if its model is small enough."""
    from tpshard.recipes.reading.extends import builtins

    file = Path(recipe.file)
    if (size := _cpu_bytes(recipe)) is not None and size < _memory() / 2:
        return CPU_HINT
    shipped = [name for name, path in builtins().items() if path.name == file.name]
    here = largest_here()
    train = f"; `tpshard train {here}` is the largest shipped recipe that runs on this machine" if here else ""
    return f"`tpshard plan {(shipped or [recipe.file])[0]} --dry-run` predicts the run without GPUs{train}"


def largest_here() -> str:
    """The shipped recipe for CPUs with the most parameters of those that this machine's memory holds; "" for none."""
    from tpshard.recipes.reading.extends import builtins
    from tpshard.recipes.reading.load import load

    sizes: dict[str, int] = {}
    for name in builtins():
        recipe = load(name)
        size = _cpu_bytes(recipe) if recipe.cluster is not None and recipe.cluster.device == "cpu" else None
        if size is not None and size < _memory() / 2:
            sizes[name] = size
    return max(sizes, key=lambda name: (sizes[name], name == "quickstart"), default="")


def _cpu_bytes(recipe: Recipe) -> int | None:
    """The least memory that training a recipe's model on the CPU takes, over all of its processes; None where the
    number of parameters is unknown, or where it needs more processes than a machine starts."""
    from tpshard.models.open_model import open_model

    cluster = recipe.cluster
    devices = 1 if cluster is None else cluster.nodes * cluster.devices_per_node
    if devices > max(MANY, os.cpu_count() or 1):
        return None
    try:
        count = open_model(recipe.model, weights=False).count
    except (Mistakes, ValueError, OSError):
        return None
    return None if count is None else count * BYTES_PER_PARAMETER


def _memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _query(tool: str, what: str) -> tuple[Sequence[Sequence[str]], str]:
    try:
        done = subprocess.run(
            [tool, what, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer: {error}"
    if done.returncode:
        messages = (done.stdout + done.stderr).strip().splitlines()
        return [], f"nvidia-smi fails: {messages[0] if messages else f'exit {done.returncode}'}"
    return list(csv.reader(done.stdout.splitlines(), skipinitialspace=True)), ""


def _number(text: str) -> float:
    number = re.match(r"\d+(?:\.\d+)?", text)
    return float(number[0]) if number else 0.0


def _gpus(count: int) -> str:
    return "1 GPU is" if count == 1 else f"{count} GPUs are"


def _wrong(message: str, why: str, fix: str) -> Diagnostic:
    return Diagnostic(message, exit=Exit.MACHINE, why=why, fix=fix)
