"""How tokens of a mixture without a capacity travel to sharded experts: by a gather, or by an all-to-all with slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.families.config import ModelConfig
from tpshard.models.families.dispatch import ExpertGroups
from tpshard.parallelism.mesh import Axes, Mesh, size_of
from tpshard.parallelism.pricing.cost import collective
from tpshard.parallelism.pricing.network import Topology
from tpshard.programs.setting import cluster
from tpshard.recipes.keys.schema import Recipe

ROUTING_BYTES = 12
"""Bytes of the id and the weight of a token's expert, which travel with the token."""
WORTH = 0.8
"""The part of a gather's time below which an all-to-all is chosen: slots are also filled, joined and emptied, which has
no price here."""


@dataclass(frozen=True)
class Dropless:
    """The form in which tokens travel to experts and their results back."""

    groups: ExpertGroups | None
    """The groups of experts that have slots; None: tokens are gathered."""
    words: str
    """The form and its reason, for plans."""


def dropless(
    recipe: Recipe, mesh: Mesh, c: ModelConfig | None, rows: Callable[[], int], itemsize: int
) -> Dropless | None:
    """The form of a recipe, by price where it leaves it open; None where no experts without a capacity are sharded.

    c: the model, if it is of a family. rows: returns the sequences of a micro-batch on a device. itemsize: bytes of an
    activation's element. Raises Mistakes (exit 4) for an all-to-all that the recipe's experts cannot have.
    """
    section, rules = recipe.sharding.dropless, recipe.sharding.rules
    axes = _axes(mesh, rules.get("expert", ()))
    if c is None or not c.experts or not c.top_k or c.capacity is not None or not axes:
        return None
    misfit = next(_misfits(recipe, mesh, c, axes), "")
    if misfit and section.form == "all_to_all":
        raise Mistakes.one(
            "`sharding.dropless.form: all_to_all` cannot be had", exit=Exit.FIT,
            where=recipe.where("sharding.dropless.form"), why=misfit, fix="form: auto or gather",
        )  # fmt: skip
    if section.form == "gather" or misfit:
        return Dropless(None, f"gathered: {misfit or '`sharding.dropless.form`'}")
    data = _axes(mesh, rules["batch"])
    groups, tokens = ExpertGroups(size_of(axes), section.slack, size_of(data)), rows() * recipe.model.seq_len
    always, *more = groups.slots(tokens, c.experts, c.top_k)
    slots = always + sum(more)
    device, _, per_host = cluster.device_of(recipe)
    topology = Topology(mesh, per_host)

    def seconds(kind: str, size: int, over: Axes = axes) -> float:
        return collective(device, topology, kind, over, size).seconds + device.overhead.issue_s

    token, routing = c.width * itemsize, c.top_k * ROUTING_BYTES  # routing travels beside the tokens one way
    every, sent = (groups.count * places for places in (tokens, always))
    gather_s = seconds("all_gather", every * (2 * token + routing)) + seconds("reduce_scatter", every * 2 * token)
    exchange_s = 2 * seconds("all_to_all", sent * (2 * token + routing))
    exchange_s += seconds("all_reduce", 4, data)  # of the load
    if device.kind == "gpu":  # whose host waits for each condition
        exchange_s += 2 * (bool(more) + (slots < tokens or bool(more))) * device.overhead.issue_s
    times = f"{exchange_s * 1e3:.3g} ms a layer by all-to-all, {gather_s * 1e3:.3g} ms by gathers"
    if section.form == "auto" and exchange_s >= WORTH * gather_s:
        worth = "" if exchange_s >= gather_s else ", too little a gain for filling slots"
        return Dropless(None, f"gathered: {times}{worth}")
    further = [f"up to {slots:,} are sent"] if more else []
    further += ["the rest is gathered"] if slots < tokens else []
    room = f"{always:,} slots for {tokens:,} tokens on each device"
    room += f"; where the load is higher {' and '.join(further)}, which is not priced" if further else ""
    return Dropless(groups, f"by all-to-all: {times}; {room}")


def _axes(mesh: Mesh, names: tuple[str, ...]) -> Axes:
    return tuple(mesh.axis(name) for name in names if mesh.axes.get(name, 1) > 1)


def _misfits(recipe: Recipe, mesh: Mesh, c: ModelConfig, axes: Axes) -> Iterator[str]:
    """Yields the reasons why tokens of a model cannot travel by all-to-all."""
    rules, data = recipe.sharding.rules, _axes(mesh, recipe.sharding.rules.get("batch", ()))
    if data[len(data) - len(axes) :] != axes:
        yield "the axes of `sharding.rules.expert` are not the last of `sharding.rules.batch`"
    if _axes(mesh, rules.get("seq", ())):
        yield "`sharding.rules.seq` divides the sequences that share slots"
    if (c.experts or 0) % size_of(axes):
        yield f"{size_of(axes)} devices do not divide {c.experts} experts"
    if recipe.pipeline is not None and recipe.pipeline.vectorized:
        yield "`pipeline.form: vectorized` has no control flow"
