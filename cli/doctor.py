"""`tpshard doctor`: checks whether this machine can run recipes."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

import typer
from tpshard.cli.shared.arguments import Json, Overwrite
from tpshard.diagnostics.diagnostic import Exit

GIB = 1 << 30
Devices = Annotated[
    int, typer.Option("--gpus", metavar="N", min=0, help="GPUs that must be usable.", show_default=False)
]
NoPair = Annotated[bool, typer.Option("--no-collective", help="Skip the collective between two ranks.")]
Measure = Annotated[
    Path | None, typer.Option("--measure", metavar="FILE", help="Write a device file.", show_default=False)
]


@dataclass(frozen=True)
class Finding:
    """One checked item in `doctor`'s report. `bad` would make a run fail; `note` would slow or limit it."""

    name: str
    value: str
    state: Literal["ok", "note", "bad"] = "ok"
    fix: str = ""


def doctor(
    as_json: Json = False,
    gpus: Devices = 0,
    no_collective: NoPair = False,
    measure: Measure = None,
    overwrite: Overwrite = False,
) -> int:
    """Check this machine: versions, devices, links, disk, limits, ports, and a collective between two processes.

    Exits with 5 if a run would fail. With --measure it times the machine instead (some minutes) and writes a device
    file for `cluster.device`.
    """
    if measure is not None:
        return _measure_device(measure, overwrite)
    rooms: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": versions, "devices": lambda: devices(gpus), "links": links, "disk": disk, "limits": limits,
        "ports": ports,
    }  # fmt: skip
    if not no_collective:
        rooms["collective"] = collective
    findings = []
    for room, examine in rooms.items():
        if not as_json:
            print(room)
        for finding in examine():
            findings.append({"room": room, **asdict(finding)})
            if not as_json:
                print(_line(finding), flush=True)
    bad = sum(finding["state"] == "bad" for finding in findings)
    if as_json:
        print(json.dumps({"schema": 1, "ok": not bad, "findings": findings}, indent=2))
    else:
        print(f"\n{bad} to mend" if bad else "\nfine")
    return Exit.MACHINE if bad else Exit.DONE


def _measure_device(out: Path, overwrite: bool) -> int:
    from tpshard.cli.shared.files import refuse, write
    from tpshard.cli.shared.measure_server import measure_server
    from tpshard.devices.measuring.measure import measure

    refuse(out, overwrite)
    text = measure(lambda stage: print(stage, file=sys.stderr), name=out.stem, measure_server=measure_server)
    write(out, text, overwrite=overwrite)
    print(out)
    return 0


def _line(finding: Finding) -> str:
    mark = {"ok": " ", "note": "-", "bad": "!"}[finding.state]
    fix = f"\n{' ' * 16}fix: {finding.fix}" if finding.fix else ""
    return f"{mark} {finding.name:<13} {finding.value}{fix}"


def versions() -> Iterator[Finding]:
    """Findings on the versions of the packages that a run imports, without importing them."""
    from importlib import metadata

    from tpshard.cli.main import version

    yield Finding("tpshard", version())
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    for name in ("torch", "triton", "numpy", "transformers", "tokenizers", "datasets", "safetensors", "wandb"):
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            needed = name not in ("triton", "wandb")
            state: Literal["bad", "note"] = "bad" if needed else "note"
            yield Finding(name, "not installed", state, f"pip install {name}" if needed else "")
            continue
        odd = name == "torch" and not (2, 11) <= tuple(int(n) for n in installed.split("+")[0].split(".")[:2]) < (2, 14)
        yield Finding(name, installed, "bad" if odd else "ok", "torch 2.11 to 2.13" if odd else "")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler:
        yield Finding("C++ compiler", compiler)
    else:
        yield Finding("C++ compiler", "none", "note", "install g++, or use compile: eager")


def devices(required: int = 0) -> Iterator[Finding]:
    """Findings on processors, memory and GPUs, and on what prevents their use."""
    import psutil
    from tpshard.devices.machine import busy, gpu_problems, probe_driver, probe_torch
    from tpshard.parallelism.runtime.cores import usable_cores

    yield Finding("cpu", f"{usable_cores():g} of {os.cpu_count()} cores usable, {platform.machine()}")
    memory = psutil.virtual_memory()
    allowed = _cgroup_memory()
    capped = f", of which this control group may use {allowed / GIB:.1f}" if allowed and allowed < memory.total else ""
    value = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free{capped}"
    yield Finding("memory", value, "note" if memory.available < 2 * GIB else "ok")
    driver = probe_driver()
    for gpu in driver.gpus:
        free = f"{gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free"
        mig = ", split into MIG slices" if gpu.mig else ""
        value = f"{gpu.name}, {free}, compute {gpu.capability}{mig}"
        yield Finding(f"gpu {gpu.index}", value, "note" if gpu.mig else "ok")
    if driver.version:
        yield Finding("driver", driver.version)
    if not driver.gpus and not driver.error and not required:
        yield Finding("gpu", "none: recipes run on the CPU here")
        return
    torch = probe_torch()
    if torch.cuda:
        yield Finding("torch", f"built for CUDA {torch.cuda}, sees {torch.devices}")
    for problem in gpu_problems(driver, torch, max(required, 1)):
        why = f"{problem.message}: {problem.why}" if problem.why else problem.message
        yield Finding("gpu", why, "bad", problem.fix)
    for problem in busy(driver, None):
        yield Finding("gpu", f"{problem.message}: {problem.why}", "note", problem.fix)


def links() -> Iterator[Finding]:
    """Findings on network interfaces, links between GPUs, and whether this host's name resolves."""
    import psutil

    addresses = psutil.net_if_addrs()
    for name, stats in sorted(psutil.net_if_stats().items()):
        ip_addresses = [a.address for a in addresses.get(name, ()) if a.family in (socket.AF_INET, socket.AF_INET6)]
        if stats.isup and ip_addresses:
            speed = f", {stats.speed} Mbit/s" if stats.speed else ""
            yield Finding(name, f"{', '.join(ip_addresses[:2])}, MTU {stats.mtu}{speed}")
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
        yield Finding("name", f"{host} resolves")
    except OSError:
        yield Finding("name", f"{host} does not resolve; runs on this host alone do not need it", "note")
    tool = shutil.which("nvidia-smi")
    if tool:
        yield from _between_gpus(tool)


def _between_gpus(tool: str) -> Iterator[Finding]:
    try:
        text = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=10, errors="replace").stdout
    except (OSError, subprocess.TimeoutExpired):
        return
    if kinds := gpu_links(text):
        slow = not all(kind.startswith("NV") for kind in kinds)
        yield Finding("gpu to gpu", ", ".join(sorted(kinds)), "note" if slow else "ok")


def gpu_links(topology: str) -> set[str]:
    """The kinds of links between GPUs in what `nvidia-smi topo -m` prints: none for one GPU.

    The header's GPUs are its first columns; network cards and affinities, whose names have blanks, follow.
    """
    rows = [line.split() for line in re.sub(r"\x1b\[\d*m", "", topology).splitlines()]
    header = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    names = list(takewhile(re.compile(r"GPU\d+").fullmatch, header))
    cells = [row[1 : len(names) + 1] for row in rows if row is not header and row and row[0] in names]
    return {kind for row in cells for kind in row} - {"X"}


def disk() -> Iterator[Finding]:
    """Findings on free disk space, and whether files can be synced and renamed, as checkpoints need."""
    shm = Path("/dev/shm")
    places = {"here": Path.cwd(), "temporary": Path(tempfile.gettempdir())} | ({"shm": shm} if shm.is_dir() else {})
    for name, path in places.items():
        try:
            free = shutil.disk_usage(path).free
            with tempfile.TemporaryDirectory(prefix=".tpshard-doctor-", dir=path) as folder:
                file = Path(folder, "a")
                with file.open("wb") as opened:
                    opened.write(b"x" * 4096)
                    opened.flush()
                    os.fsync(opened.fileno())
                file.rename(Path(folder, "b"))
        except OSError as error:
            fix = {"here": "run in a writable folder", "temporary": "set TMPDIR"}.get(name, "")
            yield Finding(name, f"{path}: {error.strerror}", "bad" if fix else "note", fix)
            continue
        little = free < (GIB if name != "shm" else GIB // 16)
        yield Finding(name, f"{path}: {free / GIB:.1f} GiB free", "note" if little else "ok")


def limits() -> Iterator[Finding]:
    """Findings on the system's limits on a process."""
    import resource

    minima = {"open files": (resource.RLIMIT_NOFILE, 1024), "processes": (resource.RLIMIT_NPROC, 256)}
    minima["locked memory"] = (resource.RLIMIT_MEMLOCK, 0)
    for name, (kind, least) in minima.items():
        soft, hard = resource.getrlimit(kind)
        value = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
        low = soft != resource.RLIM_INFINITY and soft < least
        yield Finding(name, value, "note" if low else "ok", f"ulimit, up to {hard:,}" if low else "")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        yield Finding("threads", f"OMP_NUM_THREADS={threads}")


def ports() -> Iterator[Finding]:
    """Findings on whether loopback accepts connections, and whether the default port of `serve` is free."""
    for name, port in (("loopback", 0), ("serve", 8000)):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
                yield Finding(name, f"127.0.0.1:{port or 'any'} can be listened on")
            except OSError as error:
                state: Literal["note", "bad"] = "note" if port else "bad"
                fix = "serve.port: 0 chooses a free one" if port else "loopback must be up"
                yield Finding(name, f"127.0.0.1:{port or 'any'}: {error.strerror}", state, fix)


def collective() -> Iterator[Finding]:
    """Tests an all-reduce between two processes of this host: gloo, and NCCL with two GPUs."""
    backends = ["gloo"]
    from tpshard.devices.machine import probe_driver

    driver = probe_driver()
    if len(driver.gpus) > 1 and not any(gpu.mig for gpu in driver.gpus):
        backends.append("nccl")
    for backend in backends:
        yield _pair(backend)


def _pair(backend: str, timeout: float = 90) -> Finding:
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.setdefault(key, loopback)
    with tempfile.TemporaryDirectory(prefix="tpshard-doctor-") as folder:
        argv = [sys.executable, "-P", "-m", "tpshard.devices.pair"]
        ranks = [
            subprocess.Popen(
                [*argv, str(rank), str(Path(folder, "store")), backend],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            for rank in range(2)
        ]
        try:
            outputs = [rank.communicate(timeout=timeout) for rank in ranks]
        except subprocess.TimeoutExpired:
            return Finding(backend, f"no answer within {timeout:g} s", "bad", "a firewall on loopback?")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        if rank.returncode:
            last = errors.strip().splitlines()[-1] if errors.strip() else f"exit {rank.returncode}"
            return Finding(backend, f"failed: {last}", "bad", f"{argv[-1]} prints the rest")
    result = json.loads(outputs[0][0].strip().splitlines()[-1])
    latency, rate = result["latency_s"] * 1e6, result["bytes_per_s"] / 1e9
    return Finding(backend, f"sum of two ranks: {latency:.0f} us; 4 MiB at {rate:.2f} GB/s")


def _cgroup_memory() -> int | None:
    """Bytes that the control group allows; None without such a limit."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None
