"""Compares the training of two recipes that differ in mesh or policy, and finds the first operation that differs.

Both run in this process, all ranks in lock-step, in float64: different orders of sums differ by about 1e-15, and a
difference above `BOUND` is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.parallelism.draws import SEED
from tpshard.parallelism.program import Program, info
from tpshard.parallelism.simulate import simulate
from tpshard.programs.compare.float64 import BOUND, distance, float64
from tpshard.programs.compare.lockstep import Lockstep, RandomBatches, StepValues, normal_weights, stacked
from tpshard.programs.parts.step_programs import WATCHED, micro_program, seeds
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.training import build

CANCELLED = 1e-3
"""A gradient whose norm is below this share of the norm of all gradients is compared relative to that share.

Some gradients are zero but for rounding: those of the keys' biases, since softmax ignores what is added to all scores.
"""


@dataclass(frozen=True)
class Distance:
    """The difference of a value between the two compared runs, relative in norm."""

    name: str
    step: int
    apart: float


@dataclass(frozen=True)
class Compared:
    """The losses and differences of two recipes that `compare` trained on the same batches."""

    losses: list[tuple[float, float]]
    """Per step the loss per token of each recipe."""
    distances: list[Distance]
    """Differences of losses, gradient norms, gradients, and the weights after the last step.

    Left out are weights with a gradient that is nothing but rounding, which the optimizer scales up.
    """

    @property
    def largest(self) -> Distance:
        """The tensor that differs most."""
        return max(self.distances, key=lambda d: d.apart)

    @property
    def equal(self) -> bool:
        """Whether rounding explains every difference."""
        return self.largest.apart <= BOUND


@dataclass(frozen=True)
class FirstDifference:
    """The first operation, in execution order, whose results differ by more than rounding."""

    name: str
    """Name of the operation's value."""
    apart: float
    op: str
    module: str
    phase: str
    """forward or backward."""
    shardings: tuple[str, str]
    """The shardings of the value in both runs, each with its causes down to the recipe's line."""


def vocabulary(setting: Setting) -> int | None:
    """The number of tokens of the model's vocabulary; None for a task that reads no text.

    Raises Mistakes for a user's module that does not name the dim.
    """
    if not setting.task.text:
        return None
    if (vocab := setting.spec.sizes.vocab) is not None:
        return vocab
    for name, parameter in setting.model.named_parameters():  # a recipe may name the dim
        for dim, size in zip(setting.dims.get(name, ()), parameter.shape):
            if dim == "vocab":
                return int(size)
    raise Mistakes.one(
        "no parameter of the module has a dim named `vocab`, so its vocabulary is unknown", exit=Exit.FIT,
        where=setting.recipe.where(f"model.{setting.spec.source.key}"),
        fix="name the dims of its embedding (`dims` of the module)",
    )  # fmt: skip


def compare(one: Setting, other: Setting, steps: int = 1) -> Compared:
    """Trains two settings on the same batches from the same weights, and compares their losses, gradients and weights.
    Raises Mistakes where they train different models.
    """
    _check_same(one, other)
    vocab = vocabulary(one)
    runs = [Lockstep(build(setting), vocab) for setting in (one, other)]
    losses, distances, rounding = [], [], set[str]()
    for number in range(1, steps + 1):
        a, b = (training.step() for training in runs)
        losses.append((a.loss, b.loss))
        distances += [Distance(name, number, apart) for name, apart in _distances(a, b).items()]
        least = CANCELLED * BOUND * _norm(b.gradients.values())
        rounding |= {name for name, gradient in b.gradients.items() if gradient.norm() <= least}
    weights = [training.weights() for training in runs]
    updated = {name: weight for name, weight in weights[1].items() if name not in rounding}
    distances += [Distance(f"{n} after the update", steps, distance(weights[0][n], w)) for n, w in updated.items()]
    return Compared(losses, distances)


def _distances(one: StepValues, other: StepValues) -> dict[str, float]:
    scalars = {"loss": (one.loss, other.loss), "gradient norm": (one.grad_norm, other.grad_norm)}
    pairs = {name: torch.tensor(pair, dtype=torch.float64) for name, pair in scalars.items()}
    least = CANCELLED * _norm(other.gradients.values())
    gradients = {f"gradient of {n}": distance(one.gradients[n], g, least) for n, g in other.gradients.items()}
    return {name: distance(*pair) for name, pair in pairs.items()} | gradients


def _norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all tensors' elements together."""
    return math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in tensors))


def _check_same(one: Setting, other: Setting) -> None:
    if one.recipe.task != other.recipe.task:
        raise Mistakes.one(
            f"the recipes have different tasks: `{one.recipe.task}` and `{other.recipe.task}`", exit=Exit.USAGE,
            why="both are trained on the same batches", fix="compare meshes, sharding, fsdp, remat or batch.per_device",
        )  # fmt: skip
    shapes = [{n: tuple(p.shape) for n, p in setting.single.named_parameters()} for setting in (one, other)]
    if shapes[0] != shapes[1]:
        (name, *_) = [n for n in {**shapes[0], **shapes[1]} if shapes[0].get(n) != shapes[1].get(n)]
        raise Mistakes.one(
            f"the recipes have different models: `{name}` has shape {shapes[0].get(name)} and {shapes[1].get(name)}",
            exit=Exit.USAGE, fix="compare meshes, sharding, fsdp, remat or batch.per_device",
        )  # fmt: skip
    sizes = [(s.batch.global_sequences, s.seq_len) for s in (one, other)]
    if sizes[0] != sizes[1]:
        raise Mistakes.one(
            f"the recipes have different batches: {sizes[0][0]} sequences of {sizes[0][1]} and {sizes[1][0]} of "
            f"{sizes[1][1]}", exit=Exit.USAGE, fix="give both the same batch.global_sequences and model.seq_len",
        )  # fmt: skip


# ---- where a difference begins -------------------------------------------------------------------------------------
def first_difference(one: Setting, other: Setting) -> FirstDifference | None:
    """Finds the first operation whose results differ by more than rounding in the first micro-batch of a step.

    Both run the partitioned program without buckets, prefetching and recomputation. None means that all results agree:
    the difference comes from these passes, from the sum over micro-batches or from the update.
    """
    programs = [micro_program(setting, watched=True) for setting in (one, other)]
    vocab = vocabulary(one)
    (values, _), (others, norm) = (_watched_values(s, program, vocab) for s, program in zip((one, other), programs))
    for name, value in values.items():
        expected = others.get(name)
        if expected is None or expected.shape != value.shape or distance(value, expected) <= BOUND:
            continue
        maker = _producer_of(programs[0], name)
        apart = distance(value, expected, 0.0 if maker[-1] == "forward" else CANCELLED * norm)
        if apart > BOUND:
            return FirstDifference(
                name, apart, *maker, shardings=(programs[0].explain(name), programs[1].explain(name))
            )
    return None


def _watched_values(setting: Setting, program: Program, vocab: int | None) -> tuple[dict[str, Tensor], float]:
    """Every watched value of the first step's batch, whole, by name; and the norm of all gradients."""
    values = RandomBatches(setting, vocab).next()[0]
    single = normal_weights(setting)
    for port in program.inputs:
        if port.kind == "parameter":
            values[port.key] = stacked(setting, port.name, single)
        elif port.kind == "gradient":
            values[port.key] = torch.zeros(port.shape, dtype=torch.float64)
    with float64():
        arguments = [values[port.key] for port in program.inputs if port.kind != SEED]
        results = program.results(simulate(program, arguments, seeds(setting, program, 1, 0).get((SEED, SEED))))
    watched = {name.removeprefix(WATCHED): value for (_, name), value in results.items() if name.startswith(WATCHED)}
    return watched, _norm(value for (kind, _), value in results.items() if kind == "gradient")


def _producer_of(program: Program, name: str) -> tuple[str, str, str]:
    """Op, module and phase of the node that computes a value."""
    for node in program.graph.nodes:
        if node.op == "call_function" and info(node).origin == name and info(node).comm is None:
            return str(node.target), info(node).module, info(node).phase
    return "", "", ""
