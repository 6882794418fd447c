"""The effect of uneven routing of tokens to experts on a training step: time, memory, dropped choices.

The busiest expert gets `busiest` times the mean number of tokens; the others share the rest evenly. With a capacity
every expert has equally many slots, full or not, so that time and memory stay and tokens without a slot are dropped.
Without one the device of the busiest expert computes more, and the others wait for it at the next collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.parallelism.pricing.flow import info_of
from tpshard.plan.step.expert_routing import Routing, Skew
from tpshard.plan.step.pricing import Pricing
from tpshard.programs.setting.setting import Setting

_OPS = ("tpshard.experts.default", "tpshard.experts_backward.default")


def skew(pricing: Pricing, setting: Setting, busiest: float) -> Skew:
    """Prices a step with even routing and with the busiest expert at `busiest` times the mean.

    Raises `Mistakes`: exit 2 for an impossible number, 4 for a model without experts or a pipeline.
    """
    where = setting.recipe.where("model")
    sizes = setting.spec.sizes
    experts, top_k, capacity = sizes.experts, sizes.top_k, sizes.capacity
    if not experts or not top_k:
        fix = "leave --skew out, or plan a model with experts"
        raise Mistakes.one("--skew needs a model with experts", exit=Exit.FIT, where=where, fix=fix)
    if pricing.pipeline is not None:
        raise Mistakes.one(
            "--skew does not support a pipeline", exit=Exit.FIT, where=setting.recipe.where("pipeline"),
            fix="use --skew on the recipe without `pipeline`",
        )  # fmt: skip
    if not 1 <= busiest <= experts / top_k:
        raise Mistakes.one(
            f"--skew {busiest:g}: no expert can get {busiest:g} times the mean", exit=Exit.USAGE,
            why=f"each token chooses {top_k} of {experts} experts, an expert at most once",
            fix=f"--skew between 1 and {experts / top_k:g}",
        )  # fmt: skip
    routings = [_routing(pricing, one, experts, capacity) for one in (1.0, busiest)]
    slack = None if setting.expert_groups is None else setting.expert_groups.slack
    return Skew(experts, top_k, capacity, slack, *routings)


def _routing(pricing: Pricing, busiest: float, experts: int, capacity: float | None) -> Routing:
    """Prices a step whose busiest expert gets `busiest` times the mean, and the others the rest evenly."""
    others = (experts - busiest) / max(1, experts - 1)
    total, workspace, device = pricing.fixed_s, 0, 1.0
    for entry in pricing.parts:
        tasks = list(entry.priced.tasks)
        for i, node in _products(entry.priced.kernels):
            ids, gate = (info_of(operand).specs[0] for operand in _routing_operands(node))
            own = math.prod(gate.shape[:-2])
            load = (busiest + (own - 1) * others) / own
            device = max(device, load)
            tasks[i] = tasks[i]._replace(seconds=tasks[i].seconds * load)
            choices = math.prod(ids.shape)
            used = next((arg for arg in node.args if isinstance(arg, float)), 1.0)  # of slots in groups of experts
            each = choices * used / (own if len(gate.shape) > 3 else experts)
            tokens = choices if pricing.device.kind == "gpu" else each * busiest
            hidden, width = gate.shape[-2:]
            workspace = max(workspace, _workspace(node, tokens, hidden, width, gate.dtype.itemsize))
        total += entry.part.times * replace(entry.priced, tasks=tasks).run().seconds
    dropped = 0.0
    if capacity is not None:
        dropped = (max(0.0, busiest - capacity) + (experts - 1) * max(0.0, others - capacity)) / experts
    return Routing(busiest, device, total, workspace, dropped)


def _products(kernels: list[Any]) -> Iterator[tuple[int, fx.Node]]:
    """The operations of experts among a part's kernels, with their indices."""
    for i, kernel in enumerate(kernels):
        if str(kernel.node.target) in _OPS:
            yield i, kernel.node


def _routing_operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The operands of an experts operation that hold the tokens' choices and the gate matrices."""
    after = 1 if str(node.target) == _OPS[1] else 0
    return node.args[1 + after], node.args[3 + after]  # type: ignore[return-value]


def _workspace(node: fx.Node, tokens: float, hidden: int, width: int, itemsize: int) -> int:
    """Bytes of temporaries of products with `tokens` (`kernels.experts`, on a GPU `kernels.triton_experts`)."""
    wide, narrow = (8, 5) if str(node.target) == _OPS[1] else (3, 2)
    return int(tokens * (wide * hidden + narrow * width) * itemsize)
