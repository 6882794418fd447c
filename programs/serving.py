"""The programs of a server: one step over a paged cache for each of a few numbers of rows, made like a training step.

A step's rows are tokens of any number of sequences: chunks of prompts and next tokens alike, so prefill and decode are
the same function in different sizes. A program takes `STEP`, the model's parameters (as its kernels read them), the
orders of act-ordered weights, and the cache; it gives logits [wanted, vocab], whole on every device. It is the same for
a cache of any number of blocks: that number is the executor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tpshard.kernels.linear import TILE
from tpshard.kernels.paged_attention import PAGED
from tpshard.models.assemble import evaluating
from tpshard.models.config import ModelConfig
from tpshard.models.dims import param_dims
from tpshard.parallelism.annotate import role
from tpshard.parallelism.capture import Trail, capture
from tpshard.parallelism.graph import Graph, Value
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.partitioner import mark_outputs, partition_graph
from tpshard.parallelism.program import Program
from tpshard.parallelism.propagate import propagate
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.rules.table import rule_for
from tpshard.parallelism.sharding import Sharding
from tpshard.parallelism.why import Told
from tpshard.programs import naming
from tpshard.programs.annotations import annotate
from tpshard.programs.layouts import Arrangement, arrange
from tpshard.programs.padding import notes, padded
from tpshard.programs.paging import ROWS, page_attention, rows_of, take_wanted
from tpshard.programs.served import Served
from tpshard.programs.step_kernels import (
    Pass,
    count_useful,
    fix_rows,
    fold_linears,
    fuse_norms,
    join_gates,
    merge_views,
    quantize,
    store_norms_in_order,
)
from tpshard.recipes.diagnostic import Exit, Mistakes
from tpshard.recipes.schema import Recipe

Kind = Literal["cpu", "gpu"]
BLOCK_SIZE = 16
"""Positions of a block of the cache."""
STEP = ("tokens", "positions", *ROWS, "wanted")
"""What every step brings: tokens, positions, slots, sequences [1, rows], tables [rows + 1, blocks], wanted [n]."""
LONGEST = {"cpu": 64, "gpu": 2048}
"""Rows of the largest step by default. A CPU's products gain nothing beyond, and others wait for it."""
WHOLE = [Annotation(Sharding(((),) * rank, (False,) * rank), (Told("a server's rows are whole"),)) for rank in range(3)]
"""By rank: what every device has all of."""
CACHE = Annotation(
    Sharding(((),) * 4, (False, False, True, False)), (Told("a block of the cache is whole, but for KV heads"),)
)
"""Of a cache: attention writes to what a device holds, so that it must be what attention reads."""
APART = {"cpu": 2, "gpu": 8}
"""How much larger one step is than the one before: on a GPU the first dozens of rows cost as much as one."""


@dataclass(frozen=True)
class ServeSetting:
    """A recipe with everything that its server's programs need to be built."""

    recipe: Recipe
    mesh: Mesh
    served: Served
    kind: Kind
    padding: bool = True
    """Whether an MLP is made as wide as the devices need it."""

    @staticmethod
    def of(recipe: Recipe, served: Served, kind: Kind) -> ServeSetting:
        """Mistakes (exit 4) where `serve.mesh` does not fit the model's heads."""
        if recipe.task != "lm":
            raise Mistakes.one(
                f"a model that is trained for `{recipe.task}` is not served", exit=Exit.FIT, where=recipe.where("task"),
                why="a server gives the next token",
            )  # fmt: skip
        mesh = Mesh({axis: max(1, size) for axis, size in recipe.serve.mesh.items()})
        setting = ServeSetting(recipe, mesh, served, kind)
        ways, config = setting.ways("heads"), served.config
        if config is not None and not config.divides("heads", ways):
            fit = ", ".join(str(n) for n in range(1, config.heads + 1) if config.divides("heads", n))
            raise Mistakes.one(
                f"tp {ways} does not fit {config.heads} heads and {config.kv_heads} KV heads; these do: {fit}",
                exit=Exit.FIT, where=recipe.where("serve.mesh"),
            )  # fmt: skip
        return setting

    def ways(self, dim: str) -> int:
        """Over how many devices the recipe's rules spread a dim."""
        ways = 1
        for axis in self.recipe.sharding.rules.get(dim, ()):
            ways *= self.mesh.axes.get(axis, 1)
        return ways

    @cached_property
    def config(self) -> ModelConfig | None:
        """The model's numbers, its MLP as wide as the devices need it; None for a module of the user's."""
        found, quantized = self.served.config, self.served.quantized
        if found is None or not self.padding:
            return found
        return padded(found, self.ways("mlp"), 1 if quantized is None else quantized.shared)

    @cached_property
    def model(self) -> nn.Module:
        """On `meta`, in the dtype that it computes in. Mistakes (exit 3) where a module of the user's is none."""
        try:
            return self.served.model(self.config)
        except ValueError as error:
            raise Mistakes.one(str(error), exit=Exit.RECIPE, where=self.recipe.where("model.module")) from error

    @cached_property
    def dims(self) -> dict[str, tuple[str, ...]]:
        if self.served.blueprint.architecture is not None:
            return {name: named.dims for name, named in naming.of_architecture(self.recipe, self.model).items()}
        return param_dims(self.model)

    @property
    def invariant(self) -> bool:
        """Whether a row's result may not depend on the others'."""
        told = self.recipe.serve.batch_invariant
        return self.kind == "cpu" if told is None else told

    @property
    def most(self) -> int:
        """Rows of the largest step."""
        told = self.recipe.serve.step_tokens
        return _up(max(LONGEST[self.kind], self.recipe.serve.requests) if told is None else told)

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of rows that there is a program for: a step is padded to the next one."""
        found = [TILE]
        while found[-1] < self.most:
            found.append(min(found[-1] * APART[self.kind], self.most))
        return tuple(found)

    def wanted(self, rows: int) -> int:
        """Rows of a step whose logits can be asked for: a token of each request."""
        return min(rows, _up(self.recipe.serve.requests))

    @property
    def max_seq(self) -> int:
        """Longest sequence the model is made for."""
        described = self.served.config or self.served.blueprint.architecture
        longest = None if described is None else described.max_seq
        return self.recipe.model.seq_len if longest is None else longest


def _up(rows: int) -> int:
    return -(-rows // TILE) * TILE


@dataclass(frozen=True)
class ServingPrograms:
    """What a server executes: for each number of rows the program, smallest first."""

    setting: ServeSetting
    steps: dict[int, Program]
    arrangement: Arrangement
    """How the parameters lie that the programs take."""

    @property
    def listed(self) -> list[dict[str, Any]]:
        """Rows and fingerprint of every program, as JSON shows them."""
        return [{"rows": rows, "fingerprint": program.fingerprint} for rows, program in self.steps.items()]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters that the programs are written for, which a model that is stored may have smaller."""
        return {name: tuple(p.shape) for name, p in self.setting.model.named_parameters()}

    def fitting(self, rows: int) -> int:
        """The size of the program that runs so many rows."""
        return next(size for size in self.steps if size >= rows)

    @property
    def any(self) -> Program:
        """One of them: inputs but those of `STEP` are alike in all."""
        return next(iter(self.steps.values()))

    def bytes(self, kind: str) -> int:
        """What one device holds of inputs of a kind; of the cache one block of all layers."""
        return sum(port.local_bytes for port in self.any.inputs if port.kind == kind)

    @property
    def vocab(self) -> int:
        return self.any.outputs[0].shape[-1]

    @property
    def notes(self) -> list[str]:
        """What is not as the recipe or the devices would have it, in sentences."""
        config, served = self.setting.config, self.setting.served
        padding = [] if config is None or served.config is None else notes(served.config, config, self.setting.ways)
        told = served.blueprint.config
        dropping = [] if told is None or told.capacity is None else [
            f"experts compute all tokens that choose them: `capacity: {told.capacity:g}` is for training"
        ]  # fmt: skip
        return [*([served.note] if served.note else []), *dropping, *padding]

    def cache_blocks(self, free_bytes: int) -> int:
        """Blocks of the cache on one device with `free_bytes`: those of `serve.cache_mb`, else what `serve.requests` of
        the model's longest length need, within a quarter of a CPU's free memory, which is not the server's alone, or
        three quarters of what the weights leave of a GPU's. At least one sequence's worth of 256 tokens.

        Ranks on a CPU share its memory: the caller divides.
        """
        told, each = self.setting.recipe.serve, max(1, self.bytes("cache"))
        if told.cache_mb is not None:
            return max(1, told.cache_mb * 2**20 // each)
        longest = -(-self.setting.max_seq // BLOCK_SIZE)
        room = free_bytes // 4
        if self.setting.kind != "cpu":
            room = 3 * max(0, free_bytes - self.bytes("parameter")) // 4
        return max(256 // BLOCK_SIZE, min(told.requests * longest, room // each))


def build_serving(setting: ServeSetting, rows: Sequence[int] = ()) -> ServingPrograms:
    """Captures, partitions and passes the programs of a server; `rows` instead of those that it has.

    Raises Mistakes for what does not fit: exit 4.
    """
    made = {}
    arrangement = Arrangement()
    for size in rows or setting.rows:
        made[size], arrangement = _step(setting, size)
    return ServingPrograms(setting, made, arrangement)


def _step(setting: ServeSetting, rows: int) -> tuple[Program, Arrangement]:
    graph, arrangement = _captured(setting, rows)
    mark_outputs(graph)
    names = dict.fromkeys(STEP, "batch") | {name: "parameter" for name, _ in setting.model.named_parameters()}
    names |= dict.fromkeys(arrangement.inputs, "order")
    for value in graph.inputs:
        value.marked = names.get(value.name, "cache")
    annotations = _annotations(setting, graph)
    # an order over all inputs is that of all devices; one within blocks lies where they do
    one_block = [name for name, taken in arrangement.inputs.items() if taken.blocks == 1]
    annotations |= {value: WHOLE[value.rank] for value in graph.inputs if value.name in one_block}
    program = partition_graph(propagate(graph, setting.mesh, annotations))
    caches = [
        node for node, port in zip(program.graph.find_nodes(op="placeholder"), program.inputs) if port.kind == "cache"
    ]
    assert all(user.target is PAGED for node in caches for user in node.users), "what is written would be a copy"
    _check_axes(setting, program)
    free = {"tables": (1,)}
    ports = [replace(port, free=(0,) if port.kind == "cache" else free.get(port.name, ())) for port in program.inputs]
    program = replace(program, inputs=tuple(ports))
    for one in passes(setting, arrangement, rows):
        program = one(program)
    return program, arrangement


def passes(setting: ServeSetting, arrangement: Arrangement, rows: int) -> list[Pass]:
    """What gives a step its kernels, in order."""
    weights = setting.served.coded(setting.kind, arrangement)
    own = replace(setting, padding=False)
    wider = setting.config != own.config
    return [
        *([count_useful(_flops(_captured(own, rows)[0]))] if wider else []),
        fold_linears,
        merge_views,
        fuse_norms,
        store_norms_in_order,
        quantize(weights, setting.kind, setting.invariant),
        join_gates(weights),
        *([fix_rows(setting.kind)] if setting.invariant else []),
    ]


def _captured(setting: ServeSetting, rows: int) -> tuple[Graph, Arrangement]:
    """The step as a graph of global shapes over a cache of one block, act-ordered weights in the recipe's layout."""
    model = setting.model
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def forward(tokens: Tensor, positions: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        told = (tokens, None, positions)
        return role(torch.func.functional_call(model, parameters, told, tie_weights=True).squeeze(0), "logits")

    row = [torch.empty(1, rows, dtype=torch.int64, device="meta") for _ in range(2)]
    trail = Trail()
    try:
        with torch.no_grad(), evaluating(model), trail.watch(model):
            graph = capture(forward, [*row, parameters], [*STEP[:2], *parameters], trail)
        tokens, positions = graph.inputs[:2]
        page_attention(graph, positions, BLOCK_SIZE)
        take_wanted(graph, rows_of(graph, {tokens: 1, positions: 1}), setting.wanted(rows))
    except ValueError as error:
        raise Mistakes.one(
            "the model cannot be served", exit=Exit.FIT, where=setting.recipe.where("model"), why=str(error)
        ) from error
    orders = setting.served.orders
    named = {name: setting.dims.get(name, ("", ""))[1] for name in orders}
    inner = {name: dim for name, dim in named.items() if dim in ("heads", "mlp")}
    spread = {name: setting.ways(dim) for name, dim in inner.items()}
    return graph, arrange(graph, orders, setting.recipe.serve.layout, spread, parameters)


def _flops(graph: Graph) -> dict[str, int]:
    """By operation."""
    return {op.name: rule_for(op).flops for op in graph.ops}


def _annotations(setting: ServeSetting, graph: Graph) -> dict[Value, Annotation]:
    """The recipe's, as in training; what they leave open of parameters and cache is propagated. A dim that its axes do
    not divide stays whole, as do a step's rows where the recipe says nothing of them, and the logits."""
    used = {value.name: [value] for value in graph.inputs if value.role == "parameter"}
    step = [value for value in graph.inputs if value.name in STEP]
    found = annotate(setting, graph, [v for v in step if v.name not in ("tables", "wanted")], used=used, serving=True)
    said = setting.recipe.sharding.rules.get("seq")
    whole = [value for value in step if value not in found or not said]
    found |= {value: CACHE for value in graph.inputs if value.marked == "cache"}
    return found | {v: WHOLE[v.rank] for v in [*whole, *graph.outputs] if isinstance(v, Value)}


def _check_axes(setting: ServeSetting, program: Program) -> None:
    """Mistakes (exit 4) for an axis that nothing is spread over: its devices would all do the same."""
    used = {axis.name for port in program.inputs for axis in port.layout.axes}
    for axis, size in setting.mesh.axes.items():
        if size > 1 and axis not in used:
            raise Mistakes.one(
                f"nothing in a server's step is spread over `{axis}`", exit=Exit.FIT,
                where=setting.recipe.where("serve.mesh"), why="its devices would all do the same",
                fix="an axis that sharding.rules gives heads, mlp or vocab; or several servers behind one address",
            )  # fmt: skip
