"""`tpshard launch`: starts one host's workers of a run on several hosts."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

NodeCount = Annotated[int, typer.Option("--nodes", min=1, help="Number of hosts.")]
NodeRank = Annotated[int, typer.Option("--node-rank", min=0, help="Number of this host, from 0.")]
Rendezvous = Annotated[
    str,
    typer.Option(
        "--rendezvous", metavar="HOST:PORT", show_default=False,
        help="An address of host 0 that all hosts can reach, with a free port.",
    ),
]  # fmt: skip
Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND...", show_default=False, help="The command: train RECIPE ...")
]


def launch(command: Command, nodes: NodeCount = 1, node_rank: NodeRank = 0, rendezvous: Rendezvous = "") -> int:
    """Start this host's workers of a run on several hosts.

    Run it on every host with the same command and its own --node-rank:

    tpshard launch --nodes 2 --node-rank 0 --rendezvous 10.0.0.1:29400 -- train recipe.yaml
    """
    from tpshard.cli.main import run
    from tpshard.cli.shared.worker_errors import place_of_environment
    from tpshard.parallelism.runtime.launcher import Nodes

    if command[0] != "train":
        raise typer.BadParameter(f"`{command[0]}` cannot be launched on several hosts; `train` can")
    if node_rank >= nodes:
        raise typer.BadParameter(f"{node_rank} is not below {nodes}, the number of hosts", param_hint="--node-rank")
    if nodes > 1 and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):\d{1,5}", rendezvous):
        raise typer.BadParameter(
            f"{rendezvous!r} is not HOST:PORT" if rendezvous else "several hosts need an address to connect to",
            param_hint="--rendezvous",
        )
    if place_of_environment() is not None:
        raise typer.BadParameter("this process was started by torchrun or srun: call `tpshard train` there")
    if nodes > 1:
        os.environ.update(Nodes(nodes, node_rank, rendezvous).environment())
    return run(command)
