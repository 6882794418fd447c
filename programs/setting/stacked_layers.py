"""A pipeline as a sharding (GSPMD, section 3.3): layers of all stages in one tensor, whose stage dim is sharded.

Stage s has in round r the `per_stage` layers from `(r * stages + s) * per_stage` on. Their parameters are stacked,
`[stages, ...]`, in `rounds * per_stage` modules. A step of the pipeline runs all stages at once, each on another
micro-batch, and then passes their results on by a shift along the stage dim, which becomes a permute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tpshard.models.dims import STAGE, name
from tpshard.models.layer_stacks import layer_numbers
from tpshard.parallelism.passes.copy import copy_program
from tpshard.parallelism.passes.recompute import layer_of
from tpshard.parallelism.program import INFO, Program, info
from tpshard.programs.setting.stacking import Stacking

ROWS = ("batch", "seq", "embed")
"""The dims of the residual stream."""


class LayerNumber:
    """A placeholder for the number of a stacked layer: it can be passed on; computing with it raises ValueError."""

    def __init__(self, attribute: str):
        self.attribute = attribute

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(f"`{self.attribute}` differs between the layers that a vectorized pipeline stacks")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = _refuse
    __mod__ = __pow__ = __rpow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __hash__ = _refuse  # type: ignore[assignment]


class StackedLayers(nn.ModuleList):
    """The layers of a model in stacked form; as a list, it has one layer, which runs the whole pipeline."""

    def __init__(self, layers: Sequence[nn.Module], stacking: Stacking, data_ranks: int, rows_first: bool):
        """Stacks all `layers`, whose parameters have the same names and shapes. data_ranks: the number of ranks among
        which the rows of a batch are divided, in order. rows_first: whether a tensor with as many elements in its first
        dim as the batch has rows has a batch dim, even if another dim is as large."""
        slots = (stacking.layers(slot) for slot in range(stacking.rounds * stacking.per_stage))
        super().__init__()
        numbers = layer_numbers(layers)
        self.slots = [_stack_layer(layers[members[0]], stacking.stages, numbers) for members in slots]
        for slot, layer in enumerate(self.slots):
            self.add_module(str(slot), layer)
        self.stacking, self.data_ranks, self.rows_first = stacking, data_ranks, rows_first

    def __iter__(self) -> Iterator[nn.Module]:
        yield self

    def __len__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.stacking})"

    def __getitem__(self, layers: int | slice) -> Any:
        """The pipeline, for all layers; ValueError for some of them."""
        if isinstance(layers, int):
            return [self][layers]
        every = range(self.stacking.stages * len(self.slots))
        if every[layers] != every and layers != slice(None, len(self)):
            raise ValueError("a vectorized pipeline runs all layers together, not some of them")
        return [self]

    def __getattr__(self, name: str) -> Any:
        """An attribute of the first layer, for a model that reads one of a layer: all layers are alike."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("0"), name)

    def forward(self, x: Tensor, *context: Any, **named: Any) -> Tensor:
        """x: [batch, seq, embed] -> the same, after all layers. A tensor of `context` and `named` with a batch dim goes
        with its rows.

        ValueError where a layer returns more than `x`, and where another dim of `x` has as many elements as the batch,
        so that a tensor may have either.
        """
        how, rows = self.stacking, x.shape[0]
        rows_dims = ROWS if x.dim() == len(ROWS) else (ROWS[0], *[""] * (x.dim() - 1))
        leaves, tree = pytree.tree_flatten((context, named))
        moving = [isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows for leaf in leaves]
        if any(moving) and rows in x.shape[1:] and not self.rows_first:
            mixed = f"the {rows} rows of the batch or another dim of the layers' input {list(x.shape)}"
            raise ValueError(f"the first dim of a tensor may be {mixed}: change `model.seq_len` or the batch")
        parts = [self._micros(leaf) if moves else leaf for leaf, moves in zip(leaves, moving)]
        stages = torch.arange(how.stages)
        place = stages.view(-1, *[1] * x.dim())
        micros = self._micros(x).unsqueeze(1)
        # masked once for all steps, as `results` are, so that gradients are summed over stages once too
        entering = torch.where(place == 0, micros, 0.0)
        y = micros.new_zeros(how.stages, *micros.shape[2:])
        results = []
        for time in range(how.steps):
            turns = [how.turn(time, stage) for stage in range(how.stages)]
            shifted = torch.roll(y, 1, 0) if time else y
            if turns[0] is not None and turns[0][1] == 0:
                shifted = torch.where(place == 0, 0.0, shifted) + entering[turns[0][0]]
            shifted = name(shifted, "shifted", STAGE, *rows_dims)
            since = (time - stages).clamp(0, how.micro_batches * how.rounds - 1)
            group, within = since // (how.stages * how.rounds), since % (how.stages * how.rounds)
            micro, rounds = group * how.stages + within % how.stages, within // how.stages
            own = [part.index_select(0, micro) if moves else part for part, moves in zip(parts, moving)]
            y = self._layers(shifted, turns, rounds, own, moving, tree)
            if turns[-1] is not None and turns[-1][1] == how.rounds - 1:
                results.append(y.unsqueeze(1))
        finished = torch.where(place.unsqueeze(-1) == how.stages - 1, torch.cat(results, 1), 0.0)
        return self._join_micros(finished.sum(0))

    def _layers(
        self, x: Tensor, turns: Sequence[tuple[int, int] | None], rounds: Tensor, context: Sequence[Any],
        moving: Sequence[bool], tree: Any,
    ) -> Tensor:  # fmt: skip
        """Runs every stage's layers in its round, `rounds` [stages], on its micro-batch. x: [stages, batch, ...]"""
        each = self.stacking.per_stage
        rounds_used = sorted({turn[1] for turn in turns if turn is not None})
        for place in range(each):
            layer, weights = self._weights([(turn, self.slots[turn * each + place]) for turn in rounds_used], rounds)

            def one(weights: dict[str, Tensor], x: Tensor, *own: Any, layer: nn.Module = layer) -> Tensor:
                context, named = pytree.tree_unflatten(list(own), tree)
                result = torch.func.functional_call(layer, weights, (x, *context), named)
                if not isinstance(result, Tensor) or result.shape != x.shape:
                    raise ValueError("in a vectorized pipeline a layer returns one tensor of its input's shape")
                return result

            along = tuple(0 if moves else None for moves in moving)
            x = torch.vmap(one, in_dims=(0, 0, *along))(weights, x, *context)
        return x

    def _weights(self, layers: Sequence[tuple[int, nn.Module]], rounds: Tensor) -> tuple[nn.Module, dict[str, Tensor]]:
        """A layer to run, and the parameters with which each stage runs it: those of the stage's current round."""
        (_, first), *others = layers
        weights: dict[str, Tensor] = dict(first.named_parameters())
        for turn, other in others:
            for own, parameter in other.named_parameters():
                in_round = (rounds == turn).view(-1, *[1] * (parameter.dim() - 1))
                weights[own] = torch.where(in_round, parameter, weights[own])
        return first, weights

    # ---- rows and micro-batches --------------------------------------------------------------------------------------
    def _micros(self, x: Tensor) -> Tensor:
        """[rows, ...] -> [micro-batches, rows of one, ...], where each data rank's rows stay on it."""
        ranks, micros = self.data_ranks, self.stacking.micro_batches
        return x.unflatten(0, (ranks, micros, -1)).transpose(0, 1).flatten(1, 2)

    def _join_micros(self, x: Tensor) -> Tensor:
        """Inverse of `_micros`."""
        return x.unflatten(1, (self.data_ranks, -1)).transpose(0, 1).flatten(0, 2)


def _stack_layer(layer: nn.Module, stages: int, numbers: Sequence[str]) -> nn.Module:
    """A copy of a layer whose parameters have a leading dim for the stages. numbers: attributes with its number."""
    copy = deepcopy(layer)
    for path, _, attribute in (key.rpartition(".") for key in numbers):
        setattr(copy.get_submodule(path), attribute, LayerNumber(attribute))
    for module in copy.modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            shape = (stages, *parameter.shape)
            stacked = torch.empty(shape, dtype=parameter.dtype, device="meta")
            setattr(module, own, nn.Parameter(stacked, parameter.requires_grad))
    return copy


def discount(program: Program, share: float) -> Program:
    """The program with its layers' useful FLOPs (`global_flops`) reduced to a share; the rest fills and drains the
    pipeline."""
    program, _ = copy_program(program)
    for node in program.graph.nodes:
        if layer_of(node) is not None and (facts := info(node)).global_flops:
            node.meta[INFO] = replace(facts, global_flops=round(facts.global_flops * share))
    return program
