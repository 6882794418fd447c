"""The programs of a server: one step over a paged cache for each of several numbers of rows.

A step's rows are tokens of any number of sequences, chunks of prompts and next tokens alike, so prefill and decode are
the same function in different sizes. A model with recurrent layers (`programs.recurrent_steps`) has other steps: a
token for each of many sequences, and chunks of one. Inputs are `STEP`, the parameters (in the kernels' layouts), the
orders of act-ordered weights, the cache and the states; the output is logits [logit_rows, vocab], of which a device
may have a part of the vocabulary, and for each pool of states the indices that were written. Tokens are chosen by
further programs (`sampling_programs`). The programs work for any number of cache blocks, which the executor chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.parallelism.graph import Graph, Value
from tpshard.parallelism.partitioning.partitioner import mark_outputs, partition_graph
from tpshard.parallelism.passes.run import Pass, PassResult, Watch, run
from tpshard.parallelism.program import Program
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.propagation.propagate import propagate
from tpshard.parallelism.rules.table import rule_for
from tpshard.parallelism.sharding import Sharding, replicated
from tpshard.parallelism.why import SourcePlace
from tpshard.programs.server import step_kernels
from tpshard.programs.server.act_order import Arrangement, arrange
from tpshard.programs.server.fewer_launches import FEWER
from tpshard.programs.server.padding import notes
from tpshard.programs.server.paging import (
    PAGING,
    POOLED,
    ROWS,
    RowDim,
    page_attention,
    rows_of,
    shrink,
    take_logit_rows,
)
from tpshard.programs.server.parameter_parts import cut_parameters
from tpshard.programs.server.recurrent_steps import capture_model, pool_states
from tpshard.programs.server.sampling_programs import Choice, sampling_program, select_by_kernel
from tpshard.programs.server.serve_setting import ServeSetting, Size
from tpshard.programs.server.token_choice import likeliest, nucleus
from tpshard.programs.setting.annotations import annotate, fixed, name_dims

BLOCK_SIZE = 16
"""Positions per block of the cache."""
STEP = ("tokens", "positions", *ROWS, "logit_rows", "states", "adapters")
"""Inputs of every step: tokens, positions, slots, sequences [1, rows], tables [rows + 1, blocks], logit_rows [n]; with
recurrent layers also states [rows], or [1] for a chunk; with adapters the slot of each row's, adapters [1, rows]."""
WHOLE = [fixed(replicated(rank), "a server's rows are whole") for rank in range(3)]
"""The annotation of a value that is replicated on all devices, by its rank."""
CACHE = Annotation(
    Sharding(((),) * 4, (False, False, True, False)), (SourcePlace("a block of the cache is whole, but for KV heads"),)
)
"""The annotation of a cache, sharded by KV heads at most: attention must read the local tensor that it writes to."""
LOGITS = Annotation(
    Sharding(((), ()), (False, True)), (SourcePlace("tokens are chosen where the logits are: rows are whole"),)
)
"""The annotation of the logits, sharded by the vocabulary as the head is."""


@dataclass(frozen=True)
class ServingPrograms:
    """The programs of a server."""

    setting: ServeSetting
    by_size: dict[Size, Program]
    """In the order of `ServeSetting.sizes`."""
    arrangement: Arrangement
    """The permutations that the programs expect of the parameters."""

    @property
    def listed(self) -> list[dict[str, Any]]:
        """Rows and fingerprint of every program, for JSON; with recurrent layers also whether it is a chunk's."""
        return [
            {"rows": rows, "fingerprint": program.fingerprint} | ({"chunk": chunk} if self.setting.states else {})
            for (rows, chunk), program in self.by_size.items()
        ]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters in the programs, and of parts of them; stored ones may be smaller."""
        parts = {name: part.shape for name, part in self.arrangement.parts.items()}
        return {name: tuple(p.shape) for name, p in self.setting.model.named_parameters()} | parts

    @property
    def slotted(self) -> Collection[str]:
        """The parameters that hold adapters in slots."""
        return self.setting.spec.added.keys()

    def fitting(self, rows: int) -> Size:
        """The size of the program that runs this many rows, unless they are a chunk."""
        return next(size for size in self.by_size if size.rows >= rows and not size.chunk)

    @property
    def any(self) -> Program:
        """One of the programs: all have the same inputs except those of `STEP`."""
        return next(iter(self.by_size.values()))

    def bytes(self, kind: str) -> int:
        """Bytes of one device's inputs of a kind in all programs; for the cache, of one block over all layers. `state`:
        recurrent layers' states, of all sequences."""
        ports = [port for program in self.by_size.values() for port in program.inputs if port.kind == kind]
        return sum({(port.name, port.held): port.local_bytes for port in ports}.values())

    @property
    def vocab(self) -> int:
        """Number of logits per row."""
        return self.any.outputs[0].shape[-1]

    def chooses(self, rows: int, choice: Choice, count: int | None = None) -> Program:
        """The program of a function of `token_choice` for so many rows of logits as the steps leave them."""
        program = sampling_program(choice, self.setting.mesh, self.any.outputs[0].layout, rows, self.vocab, count)
        return program if self.setting.kind == "cpu" else select_by_kernel(program)

    def choosing(self, rows: int) -> dict[str, Program]:
        """The programs that choose the tokens of a step with so many rows of logits, by name, if requests have a
        temperature and top-p; none where every device has all logits, and chooses without a program."""
        if not self.any.outputs[0].layout.axes:
            return {}
        size = self.setting.choosing_rows(rows)
        return {"likeliest token": self.chooses(size, likeliest), "token of top-p": self.chooses(size, nucleus)}

    @property
    def notes(self) -> list[str]:
        """Sentences on what differs from the recipe or does not suit the devices."""
        served, spec = self.setting.served, self.setting.spec
        stored, outline, capacity = served.spec.outline, spec.outline, served.spec.sizes.capacity
        padding = [] if stored is None or outline is None else notes(stored, outline, self.setting.ways)
        dropping = [] if capacity is None else [
            f"experts compute all tokens that choose them: `capacity: {capacity:g}` is for training"
        ]  # fmt: skip
        name = type(self.setting.model).__name__
        by_class = [f"{spec.instead}: transformers' {name} computes it"] if spec.instead else []
        limited = f"sequences have at most {self.setting.max_seq} tokens: "
        limits = [] if self.setting.chunk is None else [f"{limited}some layers attend within chunks of so many"]
        if (original := self.setting.original_seq) is not None:
            limits = [
                f"{limited}the original rotations are used; a larger `model.seq_len` uses those for long sequences"
                if self.setting.max_seq <= original
                else f"{limited}all use the rotations for long ones; `model.seq_len: {original}` uses the original ones"
            ]
        recurrent = []
        if self.setting.states and not self.setting.chunks:
            recurrent.append(
                "a step has one token of a prompt: this class does not continue from a state by several tokens at once"
            )
        if self.setting.states and self.setting.invariant:
            recurrent.append("batch_invariant: in recurrent layers the last bits of a sum may depend on the batch")
        return [*([served.note] if served.note else []), *by_class, *dropping, *limits, *recurrent, *padding]

    def cache_blocks(self, free_bytes: int) -> int:
        """The number of cache blocks on one device with `free_bytes`.

        `serve.cache_mb` decides, or else what `serve.requests` requests of the maximal length need, within a quarter of
        a CPU's free memory, or three quarters of what the weights leave on a GPU. At least one sequence of 256 tokens.
        Ranks on a CPU share its memory: the caller divides it.
        """
        section, each = self.setting.recipe.serve, max(1, self.bytes("cache"))
        free_bytes = max(0, free_bytes - self.bytes("state"))
        if section.cache_mb is not None:
            return max(1, section.cache_mb * 2**20 // each)
        longest = -(-self.setting.max_seq // BLOCK_SIZE)
        room = free_bytes // 4
        if self.setting.kind != "cpu":
            room = 3 * max(0, free_bytes - self.bytes("parameter")) // 4
        return max(256 // BLOCK_SIZE, min(section.requests * longest, room // each))


def build_serving(
    setting: ServeSetting, sizes: Iterable[Size] | None = None, watch: Callable[[Size, PassResult], None] | None = None
) -> ServingPrograms:
    """Captures and partitions the programs of a server, or only those of some sizes, and applies their passes.

    watch: called after each pass. Raises Mistakes (exit 4) for what does not fit.
    """
    programs, arrangement = dict[Size, Program](), Arrangement()
    for size in setting.sizes if sizes is None else sizes:
        programs[size], arrangement = _step(setting, size, None if watch is None else partial(watch, size))
    return ServingPrograms(setting, programs, arrangement)


def moved_orders(setting: ServeSetting) -> Mapping[str, str]:
    """What becomes of the order of each act-ordered weight (`Arrangement.between`), found on the graph of a forward
    pass, without building a program; also in a model that no server takes, such as an encoder."""
    graph, _ = capture_model(setting.model, setting.states, max(2, setting.rows[0]), False)
    return _arrange(setting, graph).between


def _step(
    setting: ServeSetting, size: Size, watch: Watch | None, whole_states: bool = False
) -> tuple[Program, Arrangement]:
    """The program of a step. whole_states: whether every device has recurrent layers' states whole."""
    graph, arrangement = _capture_step(setting, size)
    mark_outputs(graph)
    names = dict.fromkeys(STEP, "batch") | {name: "parameter" for name, _ in setting.model.named_parameters()}
    names |= dict.fromkeys(arrangement.parts, "parameter") | dict.fromkeys(arrangement.inputs, "order")
    for value in graph.inputs:
        value.marked = names.get(value.name, "state" if value.name in setting.states else "cache")
    annotations = _annotations(setting, graph, arrangement, whole_states)
    # an order over all inputs is the same on all devices; one within blocks is sharded with them
    one_block = [name for name, row_order in arrangement.inputs.items() if row_order.blocks == 1]
    annotations |= {value: WHOLE[value.rank] for value in graph.inputs if value.name in one_block}
    program = partition_graph(propagate(graph, setting.mesh, annotations))
    if not _written_in_place(program, "state") and not whole_states:
        return _step(setting, size, watch, whole_states=True)
    assert _written_in_place(program, "cache") and _written_in_place(program, "state"), "a copy would be written"
    _check_axes(setting, program)
    free = {"tables": (1,)}
    ports = [replace(port, free=(0,) if port.kind == "cache" else free.get(port.name, ())) for port in program.inputs]
    program = replace(program, inputs=tuple(ports))
    return run(passes(setting, arrangement, size), program, watch), arrangement


def _written_in_place(program: Program, kind: str) -> bool:
    """Whether only the operations that write to the inputs of this kind read them, and no copies of them."""
    nodes = zip(program.graph.find_nodes(op="placeholder"), program.inputs)
    return all(user.target in (*PAGING, *POOLED) for node, port in nodes if port.kind == kind for user in node.users)


def passes(setting: ServeSetting, arrangement: Arrangement, size: Size) -> list[Pass]:
    """The passes that give a step its kernels, in order."""
    weights = setting.served.coded_weights(setting.kind, arrangement)
    kind, invariant = setting.kind, setting.invariant
    own = replace(setting, padding=False)
    padded: list[Pass] = []
    if setting.spec != own.spec:
        flops = {op.name: rule_for(op).flops for op in _capture_step(own, size)[0].ops}
        padded = [partial(step_kernels.count_useful, flops=flops)]
    return [
        *padded,
        step_kernels.fold_linears,
        step_kernels.merge_views,
        step_kernels.fuse_norms,
        step_kernels.store_norms_in_order,
        partial(step_kernels.quantize, weights=weights, kind=kind, invariant=invariant, parts=setting.parts(size.rows)),
        partial(step_kernels.quantize_experts, weights=weights, invariant=invariant),
        *[partial(join, weights=weights) for join in step_kernels.JOINS],
        *(FEWER if kind != "cpu" else []),
        *([partial(step_kernels.fix_rows, kind=kind)] if invariant else []),
    ]


def _capture_step(setting: ServeSetting, size: Size) -> tuple[Graph, Arrangement]:
    """The step as a graph of global shapes over a cache of one block, act-ordered weights in the recipe's layout."""
    try:
        graph, row_dims, inside = _capture_rows(setting, size)
        take_logit_rows(graph, row_dims, setting.logit_rows(size.rows), inside)
    except ValueError as error:
        raise Mistakes.one(
            "the model cannot be served", exit=Exit.FIT, where=setting.recipe.where("model"), why=str(error),
            fix="a model whose tokens meet only in causal attention and in transformers' recurrent layers",
        ) from error  # fmt: skip
    return graph, _arrange(setting, graph)


def _arrange(setting: ServeSetting, graph: Graph) -> Arrangement:
    """Lays the act-ordered weights of a captured model out as the recipe says."""
    parameters = {name: p.detach() for name, p in setting.model.named_parameters()}
    parts = cut_parameters(graph, parameters)
    orders = setting.served.orders
    named = {name: setting.dims.get(name, ("", ""))[1] for name in orders}
    inner = {name: dim for name, dim in named.items() if dim in ("heads", "mlp")}
    spread = {name: setting.ways(dim) for name, dim in inner.items()}
    arrangement = arrange(graph, orders, setting.recipe.serve.layout, spread, parameters)
    if arrangement.between and (quantized := setting.served.quantized) is not None:
        arrangement.between |= quantized.in_sequence
    return replace(arrangement, parts=parts)


def _capture_rows(setting: ServeSetting, size: Size) -> tuple[Graph, dict[Value, RowDim], Collection[str]]:
    """The model's computation of a step over a paged cache, where its values hold the rows, and the paths of modules in
    which rows may meet."""
    graph, recurrent = capture_model(setting.model, setting.states, max(2, size.rows), size.chunk)
    inside = recurrent if size.chunk else ()
    tokens, positions, *adapters = graph.inputs[: 3 if setting.slots else 2]
    page_attention(graph, positions, BLOCK_SIZE)
    if setting.states:
        held = [value for value in graph.inputs if value.name in setting.states]
        pool_states(graph, positions, held, setting.pool_size)
    row_dims = rows_of(graph, dict.fromkeys((tokens, positions, *adapters), 1), inside)
    if size.rows == 1:
        shrink(graph, row_dims)
    return graph, row_dims, inside


def _annotations(
    setting: ServeSetting, graph: Graph, arrangement: Arrangement, whole_states: bool
) -> dict[Value, Annotation]:
    """The recipe's annotations, as in training; the rest of parameters, cache and states is propagated.

    Dims that their axes do not divide stay whole, as does the vocabulary if it is not divided evenly, and a step's rows
    unless the recipe shards them.
    """
    used: dict[str, list[Value]] = {}
    for value in graph.inputs:
        if value.role == "parameter":
            part = arrangement.parts.get(value.name)
            used.setdefault(value.name if part is None else part.parameter, []).append(value)
    step = [value for value in graph.inputs if value.name in STEP]
    rows = [v for v in step if v.name not in ("tables", "logit_rows", "states")]
    name_dims(graph, setting.dims, rows, used=used)
    annotations = annotate(setting, graph, rows, used=used, serving=True)
    seq_axes = setting.recipe.sharding.rules.get("seq")
    whole = [value for value in step if value not in annotations or not seq_axes]
    annotations |= {value: CACHE for value in graph.inputs if value.marked == "cache"}
    annotations |= {value: _state(value, whole_states) for value in graph.inputs if value.marked == "state"}
    annotations |= {v: WHOLE[v.rank] for v in [*whole, *graph.outputs] if isinstance(v, Value)}
    logits = graph.outputs[0]
    assert isinstance(logits, Value)
    return annotations if logits.shape[-1] % setting.mesh.ranks else annotations | {logits: LOGITS}


def _state(pool: Value, whole: bool) -> Annotation:
    """The annotation of a pool of states, sharded within states or not at all."""
    free = (False, *[not whole] * (pool.rank - 1))
    return Annotation(Sharding(((),) * pool.rank, free), (SourcePlace("sequences' states are in one pool"),))


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
