"""The programs of a server: one step over a paged cache for each of several numbers of rows.

A step's rows are tokens of any number of sequences, chunks of prompts and next tokens alike, so prefill and decode are
the same function in different sizes. Inputs are `STEP`, the parameters (in the kernels' layouts), the orders of
act-ordered weights, and the cache; the output is logits [logit_rows, vocab], whole on every device. The programs work
for any number of cache blocks, which the executor chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tpshard.kernels.linear import TILE
from tpshard.models.assemble import evaluating
from tpshard.models.config import ModelConfig
from tpshard.models.dims import param_dims
from tpshard.models.own_attention import limit_length
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
from tpshard.parallelism.why import SourcePlace
from tpshard.programs import naming
from tpshard.programs.annotations import annotate
from tpshard.programs.layouts import Arrangement, arrange
from tpshard.programs.padding import notes, pad_mlp
from tpshard.programs.paging import PAGING, ROWS, page_attention, rows_of, take_logit_rows
from tpshard.programs.parameter_parts import cut_parameters
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
    quantize_experts,
    store_norms_in_order,
)
from tpshard.programs.wrong_model import wrong_model
from tpshard.recipes.diagnostic import Exit, Mistakes, join
from tpshard.recipes.schema import Recipe

Kind = Literal["cpu", "gpu"]
BLOCK_SIZE = 16
"""Positions per block of the cache."""
STEP = ("tokens", "positions", *ROWS, "logit_rows")
"""Inputs of every step: tokens, positions, slots, sequences [1, rows], tables [rows + 1, blocks], logit_rows [n]."""
LONGEST = {"cpu": 64, "gpu": 2048}
"""Rows of the largest step by default. More rows gain nothing on a CPU, and delay other requests."""
WHOLE = [
    Annotation(Sharding(((),) * rank, (False,) * rank), (SourcePlace("a server's rows are whole"),))
    for rank in range(3)
]
"""The annotation of a value that is replicated on all devices, by its rank."""
CACHE = Annotation(
    Sharding(((),) * 4, (False, False, True, False)), (SourcePlace("a block of the cache is whole, but for KV heads"),)
)
"""The annotation of a cache, sharded by KV heads at most: attention must read the local tensor that it writes to."""
APART = {"cpu": 2, "gpu": 8}
"""The ratio of consecutive step sizes. On a GPU the first dozens of rows cost as much as one."""


@dataclass(frozen=True)
class ServeSetting:
    """A recipe with everything needed to build its server's programs."""

    recipe: Recipe
    mesh: Mesh
    served: Served
    kind: Kind
    padding: bool = True
    """Whether the MLP is padded to a width that the devices divide."""

    @staticmethod
    def of(recipe: Recipe, served: Served, kind: Kind) -> ServeSetting:
        """The setting of a recipe. Mistakes (exit 4) where `serve.mesh` does not fit the model's heads."""
        if recipe.task != "lm":
            raise Mistakes.one(
                f"a model with `task: {recipe.task}` cannot be served", exit=Exit.FIT, where=recipe.where("task"),
                why="a server predicts the next token", fix="serve a model that is trained with task: lm",
            )  # fmt: skip
        mesh = Mesh({axis: max(1, size) for axis, size in recipe.serve.mesh.items()})
        setting = ServeSetting(recipe, mesh, served, kind)
        ways, config = setting.ways("heads"), served.config
        if config is not None and not config.divides("heads", ways):
            fit = join(str(n) for n in range(1, config.heads + 1) if config.divides("heads", n))
            raise Mistakes.one(
                f"tp {ways} does not fit {config.heads} heads and {config.kv_heads} KV heads", exit=Exit.FIT,
                where=recipe.where("serve.mesh"), fix=f"serve.mesh.tp: {fit}",
            )  # fmt: skip
        return setting

    def ways(self, dim: str) -> int:
        """The number of devices over which the recipe's rules shard a dim."""
        ways = 1
        for axis in self.recipe.sharding.rules.get(dim, ()):
            ways *= self.mesh.axes.get(axis, 1)
        return ways

    @cached_property
    def config(self) -> ModelConfig | None:
        """The model's configuration with a padded MLP; None for a user's module."""
        config, quantized = self.served.config, self.served.quantized
        if config is None or not self.padding:
            return config
        return pad_mlp(config, self.ways("mlp"), 1 if quantized is None else quantized.shared)

    @cached_property
    def model(self) -> nn.Module:
        """The module on `meta`, in its compute dtype. Mistakes (exit 3) for an invalid user's module."""
        try:
            model = self.served.model(self.config)
        except ValueError as error:
            raise wrong_model(self.recipe, error) from error
        limit_length(model, self.max_seq)
        return model

    @cached_property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """The dim names of the parameters that have some."""
        if self.served.config is not None:  # the recipe's `model.dims` are of another model
            return param_dims(self.model)
        named = naming.dim_names(self.recipe, self.model, self.served.blueprint.architecture)
        return {name: naming.dims for name, naming in named.items()}

    @property
    def invariant(self) -> bool:
        """Whether a row's result must not depend on the other rows."""
        setting = self.recipe.serve.batch_invariant
        return self.kind == "cpu" if setting is None else setting

    @property
    def most(self) -> int:
        """Rows of the largest step."""
        step_tokens = self.recipe.serve.step_tokens
        return _up(max(LONGEST[self.kind], self.recipe.serve.requests) if step_tokens is None else step_tokens)

    @property
    def rows(self) -> tuple[int, ...]:
        """The sizes of the server's programs in rows; a step is padded to the next one."""
        sizes = [TILE]
        while sizes[-1] < self.most:
            sizes.append(min(sizes[-1] * APART[self.kind], self.most))
        return tuple(sizes)

    def logit_rows(self, rows: int) -> int:
        """The maximal number of rows of a step with logits: one token per request."""
        return min(rows, _up(self.recipe.serve.requests))

    @property
    def max_seq(self) -> int:
        """The longest sequence that is served: the longest that the model supports, with two exceptions.

        Attention within chunks is served within the first chunk. Where rotary frequencies depend on the length,
        `model.seq_len` decides; its default is `original_seq`.
        """
        described = self.served.config or self.served.blueprint.architecture
        longest = None if described is None else described.max_seq
        written = self.recipe.model.seq_len
        if self.chunk is not None:
            longest = min(longest or self.chunk, self.chunk)
        elif self.original_seq is not None:
            asked = written if self.recipe.where("model.seq_len").line else self.original_seq
            longest = min(longest or asked, asked)
        return written if longest is None else longest

    @property
    def chunk(self) -> int | None:
        """The number of tokens within which some layers of the model attend; None without such layers."""
        own_class = self.served.blueprint.architecture
        return None if own_class is None else own_class.chunk

    @property
    def original_seq(self) -> int | None:
        """The length of sequences above which the rotary embedding uses other frequencies; None if it never does."""
        own_class = self.served.blueprint.architecture
        return None if own_class is None else own_class.original_seq


def _up(rows: int) -> int:
    return -(-rows // TILE) * TILE


@dataclass(frozen=True)
class ServingPrograms:
    """The programs of a server, one per number of rows, smallest first."""

    setting: ServeSetting
    steps: dict[int, Program]
    arrangement: Arrangement
    """The permutations that the programs expect of the parameters."""

    @property
    def listed(self) -> list[dict[str, Any]]:
        """Rows and fingerprint of every program, for JSON."""
        return [{"rows": rows, "fingerprint": program.fingerprint} for rows, program in self.steps.items()]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters in the programs, and of parts of them; stored ones may be smaller."""
        parts = {name: part.shape for name, part in self.arrangement.parts.items()}
        return {name: tuple(p.shape) for name, p in self.setting.model.named_parameters()} | parts

    def fitting(self, rows: int) -> int:
        """The size of the program that runs this many rows."""
        return next(size for size in self.steps if size >= rows)

    @property
    def any(self) -> Program:
        """One of the programs: all have the same inputs except those of `STEP`."""
        return next(iter(self.steps.values()))

    def bytes(self, kind: str) -> int:
        """Bytes of one device's inputs of a kind; for the cache, of one block over all layers."""
        return sum(port.local_bytes for port in self.any.inputs if port.kind == kind)

    @property
    def vocab(self) -> int:
        """Number of logits per row."""
        return self.any.outputs[0].shape[-1]

    @property
    def notes(self) -> list[str]:
        """Sentences on what differs from the recipe or does not suit the devices."""
        config, served = self.setting.config, self.setting.served
        padding = [] if config is None or served.config is None else notes(served.config, config, self.setting.ways)
        stored_config = served.blueprint.config
        dropping = [] if stored_config is None or stored_config.capacity is None else [
            f"experts compute all tokens that choose them: `capacity: {stored_config.capacity:g}` is for training"
        ]  # fmt: skip
        limited = f"sequences have at most {self.setting.max_seq} tokens: "
        limits = [] if self.setting.chunk is None else [f"{limited}some layers attend within chunks of so many"]
        if (original := self.setting.original_seq) is not None:
            limits = [
                f"{limited}the original rotations are used; a larger `model.seq_len` uses those for long sequences"
                if self.setting.max_seq <= original
                else f"{limited}all use the rotations for long ones; `model.seq_len: {original}` uses the original ones"
            ]
        return [*([served.note] if served.note else []), *dropping, *limits, *padding]

    def cache_blocks(self, free_bytes: int) -> int:
        """The number of cache blocks on one device with `free_bytes`.

        `serve.cache_mb` decides, or else what `serve.requests` requests of the maximal length need, within a quarter of
        a CPU's free memory, or three quarters of what the weights leave on a GPU. At least one sequence of 256 tokens.
        Ranks on a CPU share its memory: the caller divides it.
        """
        section, each = self.setting.recipe.serve, max(1, self.bytes("cache"))
        if section.cache_mb is not None:
            return max(1, section.cache_mb * 2**20 // each)
        longest = -(-self.setting.max_seq // BLOCK_SIZE)
        room = free_bytes // 4
        if self.setting.kind != "cpu":
            room = 3 * max(0, free_bytes - self.bytes("parameter")) // 4
        return max(256 // BLOCK_SIZE, min(section.requests * longest, room // each))


def build_serving(setting: ServeSetting, rows: Sequence[int] = ()) -> ServingPrograms:
    """Captures and partitions the programs of a server, and applies their passes; `rows` overrides the sizes.

    Raises Mistakes (exit 4) for what does not fit.
    """
    steps = {}
    arrangement = Arrangement()
    for size in rows or setting.rows:
        steps[size], arrangement = _step(setting, size)
    return ServingPrograms(setting, steps, arrangement)


def _step(setting: ServeSetting, rows: int) -> tuple[Program, Arrangement]:
    graph, arrangement = _capture_step(setting, rows)
    mark_outputs(graph)
    names = dict.fromkeys(STEP, "batch") | {name: "parameter" for name, _ in setting.model.named_parameters()}
    names |= dict.fromkeys(arrangement.parts, "parameter") | dict.fromkeys(arrangement.inputs, "order")
    for value in graph.inputs:
        value.marked = names.get(value.name, "cache")
    annotations = _annotations(setting, graph, arrangement)
    # an order over all inputs is the same on all devices; one within blocks is sharded with them
    one_block = [name for name, row_order in arrangement.inputs.items() if row_order.blocks == 1]
    annotations |= {value: WHOLE[value.rank] for value in graph.inputs if value.name in one_block}
    program = partition_graph(propagate(graph, setting.mesh, annotations))
    caches = [
        node for node, port in zip(program.graph.find_nodes(op="placeholder"), program.inputs) if port.kind == "cache"
    ]
    assert all(user.target in PAGING for node in caches for user in node.users), "what is written would be a copy"
    _check_axes(setting, program)
    free = {"tables": (1,)}
    ports = [replace(port, free=(0,) if port.kind == "cache" else free.get(port.name, ())) for port in program.inputs]
    program = replace(program, inputs=tuple(ports))
    for one in passes(setting, arrangement, rows):
        program = one(program)
    return program, arrangement


def passes(setting: ServeSetting, arrangement: Arrangement, rows: int) -> list[Pass]:
    """The passes that give a step its kernels, in order."""
    weights = setting.served.coded_weights(setting.kind, arrangement)
    own = replace(setting, padding=False)
    wider = setting.config != own.config
    return [
        *([count_useful(_flops(_capture_step(own, rows)[0]))] if wider else []),
        fold_linears,
        merge_views,
        fuse_norms,
        store_norms_in_order,
        quantize(weights, setting.kind, setting.invariant),
        quantize_experts(weights, setting.invariant),
        join_gates(weights),
        *([fix_rows(setting.kind)] if setting.invariant else []),
    ]


def _capture_step(setting: ServeSetting, rows: int) -> tuple[Graph, Arrangement]:
    """The step as a graph of global shapes over a cache of one block, act-ordered weights in the recipe's layout."""
    model = setting.model
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def forward(tokens: Tensor, positions: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        arguments = (tokens, None, positions)
        return role(torch.func.functional_call(model, parameters, arguments, tie_weights=True).squeeze(0), "logits")

    row = [torch.empty(1, rows, dtype=torch.int64, device="meta") for _ in range(2)]
    trail = Trail()
    try:
        with torch.no_grad(), evaluating(model), trail.watch(model):
            graph = capture(forward, [*row, parameters], [*STEP[:2], *parameters], trail)
        tokens, positions = graph.inputs[:2]
        page_attention(graph, positions, BLOCK_SIZE)
        take_logit_rows(graph, rows_of(graph, {tokens: 1, positions: 1}), setting.logit_rows(rows))
    except ValueError as error:
        raise Mistakes.one(
            "the model cannot be served", exit=Exit.FIT, where=setting.recipe.where("model"), why=str(error),
            fix="a model whose tokens meet only in causal attention",
        ) from error  # fmt: skip
    parts = cut_parameters(graph, parameters)
    orders = setting.served.orders
    named = {name: setting.dims.get(name, ("", ""))[1] for name in orders}
    inner = {name: dim for name, dim in named.items() if dim in ("heads", "mlp")}
    spread = {name: setting.ways(dim) for name, dim in inner.items()}
    arrangement = arrange(graph, orders, setting.recipe.serve.layout, spread, parameters)
    return graph, replace(arrangement, parts=parts)


def _flops(graph: Graph) -> dict[str, int]:
    """Name of each operation of a graph -> its FLOPs."""
    return {op.name: rule_for(op).flops for op in graph.ops}


def _annotations(setting: ServeSetting, graph: Graph, arrangement: Arrangement) -> dict[Value, Annotation]:
    """The recipe's annotations, as in training; the rest of parameters and cache is propagated.

    Dims that their axes do not divide stay whole, as do the logits, and a step's rows unless the recipe shards them.
    """
    used: dict[str, list[Value]] = {}
    for value in graph.inputs:
        if value.role == "parameter":
            part = arrangement.parts.get(value.name)
            used.setdefault(value.name if part is None else part.parameter, []).append(value)
    step = [value for value in graph.inputs if value.name in STEP]
    annotations = annotate(
        setting, graph, [v for v in step if v.name not in ("tables", "logit_rows")], used=used, serving=True
    )
    seq_axes = setting.recipe.sharding.rules.get("seq")
    whole = [value for value in step if value not in annotations or not seq_axes]
    annotations |= {value: CACHE for value in graph.inputs if value.marked == "cache"}
    return annotations | {v: WHOLE[v.rank] for v in [*whole, *graph.outputs] if isinstance(v, Value)}


def _check_axes(setting: ServeSetting, program: Program) -> None:
    """Raises Mistakes (exit 4) for a mesh axis over which nothing is sharded."""
    used = {axis.name for port in program.inputs for axis in port.layout.axes}
    for axis, size in setting.mesh.axes.items():
        if size > 1 and axis not in used:
            raise Mistakes.one(
                f"nothing in a server's step is sharded over `{axis}`", exit=Exit.FIT,
                where=setting.recipe.where("serve.mesh"), why="its devices would all compute the same",
                fix="an axis to which sharding.rules maps heads, mlp or vocab; or several servers behind one address",
            )  # fmt: skip
