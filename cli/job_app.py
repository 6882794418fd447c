"""`tpshard job`: writes the job of a run for SLURM, Kubernetes, torchrun or SkyPilot to stdout."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from tpshard.cli.main import Command, group
from tpshard.cli.shared.arguments import Overrides, RecipeArgument, load
from tpshard.diagnostics.diagnostic import Exit, Mistakes

if TYPE_CHECKING:
    from tpshard.cli.shared.job_texts import EngineJob

app = group("Write the job of a run for SLURM, Kubernetes, torchrun or SkyPilot to stdout.")

Retries = Annotated[
    int, typer.Option(min=0, help="Restarts after exit 75 (preempted, saved) and 9 (a worker was lost).")
]
Folder = Annotated[str, typer.Option(metavar="PATH", help="The shared folder of run folders. Default: run.dir.")]
Hours = Annotated[float, typer.Option(min=0, help="Limit of the job in hours; 0: none.")]


@app.command(cls=Command)
def slurm(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    retries: Retries = 3,
    folder: Folder = "",
    hours: Hours = 0,
    partition: Annotated[str, typer.Option(metavar="NAME", help="The partition.")] = "",
    account: Annotated[str, typer.Option(metavar="NAME", help="The account.")] = "",
) -> None:
    """Write an sbatch script: tpshard job slurm RECIPE > run.sbatch; sbatch run.sbatch

    The recipe and its data lie where all hosts find them.
    """
    from tpshard.cli.shared import job_texts

    extra = {key: value for key, value in (("partition", partition), ("account", account)) if value}
    _write(job_texts.slurm, recipe, overrides, retries, folder, hours=hours, extra=extra)


@app.command(cls=Command)
def k8s(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    retries: Retries = 3,
    image: Annotated[str, typer.Option(metavar="IMAGE", help="The container image, with tpshard in it.")] = "",
    claim: Annotated[
        str, typer.Option(metavar="NAME", help="The PersistentVolumeClaim of run folders. Default: NAME-runs.")
    ] = "",
    hours: Hours = 0,
) -> None:
    """Write a ConfigMap and a JobSet: tpshard job k8s RECIPE --image IMAGE | kubectl apply -f -

    Secrets are taken from a Secret with the job's name: kubectl create secret generic NAME --from-literal ...
    """
    from tpshard.cli.shared import job_texts

    if not image:
        raise typer.BadParameter("a JobSet needs an image in which tpshard is installed", param_hint="--image")
    _write(job_texts.kubernetes, recipe, overrides, retries, claim, image=image, hours=hours, whole=True)


@app.command(cls=Command)
def torchrun(recipe: RecipeArgument, overrides: Overrides = None, retries: Retries = 3, folder: Folder = "") -> None:
    """Write the line to start on every host; $HEAD is the first one's address.

    torchrun does not tell exit codes apart: it restarts after any failure.
    """
    from tpshard.cli.shared import job_texts

    _write(job_texts.torchrun, recipe, overrides, retries, folder)


@app.command(cls=Command)
def sky(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    image: Annotated[str, typer.Option(metavar="IMAGE", help="A container image.")] = "",
    bucket: Annotated[
        str, typer.Option(metavar="URL", help="The object store of run folders: s3://NAME or gs://NAME.")
    ] = "",
) -> None:
    """Write a SkyPilot task: tpshard job sky RECIPE > run.sky.yaml; sky jobs launch run.sky.yaml

    SkyPilot recovers it after exit 75 and 9, without a limit.
    """
    from tpshard.cli.shared import job_texts

    if bucket and not re.match(r"(s3|gs|r2|cos|oci)://", bucket):
        raise typer.BadParameter(f"{bucket!r} is no URL of an object store, such as s3://NAME", param_hint="--bucket")
    _write(job_texts.sky, recipe, overrides, 0, bucket, image=image, whole=True)


def _write(
    text: Callable[[EngineJob], str], source: str, overrides: list[str] | None, retries: int, folder: str, *,
    image: str = "", hours: float = 0, extra: Mapping[str, str] | None = None, whole: bool = False,
) -> None:  # fmt: skip
    """Prints a job. whole: it holds the recipe, not only the command line."""
    import math

    from tpshard.cli.shared.job_texts import EngineJob
    from tpshard.recipes.text.write import MASK, mask, secrets_of

    recipe = load(source, overrides)
    for key, value in secrets_of(recipe):
        typed = recipe.where(key).file.startswith("<")  # the job repeats what the command line says
        if MASK in str(mask(value)) and (typed or whole):
            raise Mistakes.one(
                f"the value of `{key}` would stand in the job", exit=Exit.USAGE, why="a job only names secrets",
                fix=f"{key}='${{oc.env:NAME}}', with the secret in the environment variable NAME",
            )  # fmt: skip
    cluster = recipe.cluster
    if cluster is None and -1 in recipe.mesh.values():
        raise Mistakes.one(
            "the recipe does not say how many devices it is for", exit=Exit.FIT, where=recipe.where("mesh"),
            why="`mesh` takes the devices of the machine", fix="cluster.device=h100-sxm-80g cluster.devices_per_node=8",
        )  # fmt: skip
    hosts, devices, gpu = 1, math.prod(recipe.mesh.values()), False
    if cluster is not None:
        from tpshard.devices.read import device

        hosts, devices = cluster.nodes, cluster.devices_per_node
        gpu = device(cluster.device, recipe.where("cluster.device")).kind == "gpu"
    job = EngineJob(
        recipe, source, tuple(overrides or ()), hosts, devices, gpu, retries, folder, image, hours, dict(extra or {})
    )  # fmt: skip
    for name in job.plain():
        if name not in os.environ:
            print(f"note: {name} is not set here; the run needs it", file=sys.stderr)
    sys.stdout.write(text(job))
