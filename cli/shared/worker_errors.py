"""The text of a worker's error, and the number and kind of devices, for the commands that start workers."""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tpshard.cli.shared.machine_errors import of_machine
from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, as_text
from tpshard.files.folder_json import FolderError

if TYPE_CHECKING:
    from tpshard.parallelism.runtime.launcher import Nodes
    from tpshard.parallelism.runtime.place import WorkerPlace
    from tpshard.recipes.keys.schema import Recipe


def describe(error: BaseException) -> tuple[str, int]:
    """The text of an error for the user, and its exit code."""
    from tpshard.cli.main import colorful, columns, version
    from tpshard.parallelism.runtime.messages import WorkerFault

    def text(*diagnostics: Diagnostic) -> str:
        return as_text(diagnostics, color=colorful(sys.stderr), width=columns(sys.stderr)).rstrip("\n")

    if isinstance(error, Mistakes):
        return text(*error.diagnostics), int(error.exit)
    if isinstance(error, WorkerFault):
        return text(Diagnostic(error.message, Exit(error.exit), None, error.why, error.fix)), error.exit
    if isinstance(error, FolderError):  # found while weights are read
        return text(Diagnostic(str(error), Exit.CHECKPOINT, None, "", error.fix)), int(Exit.CHECKPOINT)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", int(Exit.INTERRUPTED)
    if type(error).__name__ == "OutOfMemoryError":
        out_of_memory = Diagnostic(
            "the device ran out of memory", Exit.FIT, None, str(error).splitlines()[0],
            "use a smaller batch.per_device, remat: full, or a larger fsdp axis; checkpoints are unchanged",
        )  # fmt: skip
        return text(out_of_memory), int(Exit.FIT)
    if (diagnostic := of_machine(error)) is not None:
        return text(diagnostic), int(diagnostic.exit)
    trace = "".join(traceback.format_exception(error)).rstrip("\n")
    return f"{trace}\n\nThis is a bug in tpshard {version()}, not in your recipe: please report the lines above", 1


def place_of_environment() -> WorkerPlace | None:
    """The place among the workers that a launcher gave this process; None if there is none. Raises `Mistakes` (exit 5)
    where its variables are missing or malformed."""
    from tpshard.parallelism.runtime import place

    try:
        return place.find(os.environ)
    except ValueError as error:
        fix = "correct it, or unset RANK, WORLD_SIZE and MASTER_ADDR to start the workers of this host"
        raise Mistakes.one(str(error), exit=Exit.MACHINE, fix=fix) from error


def visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    """The number of CUDA devices that a worker would see, without importing torch."""
    from tpshard.devices.machine import probe_driver

    chosen = env.get("CUDA_VISIBLE_DEVICES")
    gpus = len(probe_driver().gpus) if chosen is None or chosen.strip() else 0
    if chosen is None:
        return gpus
    return min(gpus, len([part for part in chosen.split(",") if part.strip() not in ("", "-1")]))


def device_kind(recipe: Recipe) -> str:
    """cpu or cuda, from the recipe's cluster; without one, cuda if there is a GPU."""
    if recipe.cluster is None:
        return "cuda" if visible_gpus() else "cpu"
    from tpshard.devices import read as devices

    described = devices.device(recipe.cluster.device, recipe.where("cluster.device"))
    return "cuda" if described.kind == "gpu" else "cpu"


def device_of_worker(recipe: Recipe, place: WorkerPlace) -> str:
    """`device_kind`, for a worker. Raises `Mistakes` (exit 5) where another launcher's worker has no GPU that the
    recipe can use; tpshard's own launcher has looked at them before it started any."""
    kind = device_kind(recipe)
    if kind == "cuda" and place.launcher != "tpshard":
        from tpshard.devices import machine

        machine.require(recipe, 1 if visible_gpus() == 1 else place.local_world)
    return kind


def workers_of(recipe: Recipe, nodes: Nodes) -> int:
    """The number of workers of a run over all hosts; the mesh must fit it.

    Raises `Mistakes` (exit 5) where it does not, or where the recipe needs more hosts than were launched.
    """
    cluster = recipe.cluster
    if cluster is not None and cluster.nodes != nodes.count:
        raise Mistakes.one(
            f"the recipe is for {cluster.nodes} hosts, but {nodes.count} were launched",
            exit=Exit.MACHINE,
            where=recipe.where("cluster.nodes"),
            fix=f"on every host: tpshard launch --nodes {cluster.nodes} --node-rank R --rendezvous HOST:PORT -- train "
            "...; or srun or torchrun; or cluster.nodes=1 with a smaller mesh",
        )
    if cluster is not None:
        world = cluster.nodes * cluster.devices_per_node
    elif gpus := visible_gpus():
        world = gpus * nodes.count
    else:
        world = math.prod(size for size in recipe.mesh.values() if size != -1)
    recipe.mesh_on(world)
    return world
