"""Steps of a server's model with recurrent layers: their states become pools, one state per sequence.

Such a step is of one of two kinds. In the first its rows are the next tokens of as many sequences: the model computes
them as a batch [rows, 1], so that nothing meets. In the second its rows are a chunk of one sequence [1, rows], which
recurrent modules read in order; that they do so causally is theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tpshard.kernels.recurrences.state_pool import READ_STATE, WRITE_STATE
from tpshard.models.adapters.lora_modules import RowSlots
from tpshard.models.assemble import evaluating
from tpshard.models.transformers.state_cache import continuing
from tpshard.parallelism.annotate import role
from tpshard.parallelism.graph import Graph, Op, Place, Ref, Value
from tpshard.parallelism.tracing.capture import Trail, capture

THREE = (Ref(0), Ref(1), Ref(2))
CHUNK = 4
"""Tokens of the smallest chunk; the last tokens of a prompt, and answers, are steps of a token each."""


@dataclass(frozen=True)
class StateShape:
    """The shape [1, ...] and dtype of one sequence's state in a layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def state_shapes(model: nn.Module) -> dict[str, StateShape]:
    """The states of a causal language model of transformers, by name: those that it has after some tokens."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    names: list[str] = []

    def begin(tokens: Tensor, parameters: dict[str, Tensor]) -> list[Tensor]:
        with continuing(model, None, str) as cache:
            torch.func.functional_call(model, parameters, (tokens, None, torch.zeros_like(tokens)), tie_weights=True)
        names.extend(cache.held)
        return list(cache.held.values())

    tokens = torch.empty(1, CHUNK, dtype=torch.int64, device="meta")
    with torch.no_grad(), evaluating(model):
        graph = capture(begin, [tokens, parameters], ["tokens", *parameters])
    return {
        name: StateShape(value.shape, value.dtype)
        for name, value in zip(names, graph.outputs)
        if isinstance(value, Value)
    }


def capture_model(model: nn.Module, shapes: Mapping[str, StateShape], rows: int, chunk: bool) -> tuple[Graph, set[str]]:
    """The model's computation of a step's rows as a graph, and the paths of its recurrent modules.

    Inputs: tokens, positions [1, rows], with slots for adapters the rows' slots [1, rows], the states of these
    `shapes`, [rows, ...] or [1, ...] for a chunk, and the parameters. Outputs: logits [rows, vocab], new states.
    """
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    trail, recurrent = Trail(), set[str]()
    row_slots: RowSlots | None = getattr(model, "row_slots", None)

    def forward(
        tokens: Tensor, positions: Tensor, slots: list[Tensor], states: dict[str, Tensor],
        parameters: dict[str, Tensor],
    ) -> list[Tensor]:  # fmt: skip
        if row_slots is not None:
            (row_slots.of_rows,) = slots
        if shapes and not chunk:
            tokens, positions = tokens.transpose(0, 1), positions.transpose(0, 1)
        arguments = (tokens, None, positions)
        held = {name: state.clone() for name, state in states.items()}  # modules may write into a state
        with continuing(model, held, lambda: trail.place.module) if shapes else nullcontext() as cache:
            logits = torch.func.functional_call(model, parameters, arguments, tie_weights=True)
        if cache is not None:
            recurrent.update(cache.places)
        new_states = [] if cache is None else [cache.held[name] for name in shapes]
        return [role(logits.flatten(0, 1), "logits"), *new_states]

    tokens, positions, *slots = (
        torch.empty(1, rows, dtype=torch.int64, device="meta") for _ in range(2 if row_slots is None else 3)
    )
    states = {
        name: torch.empty(1 if chunk else rows, *state.shape[1:], dtype=state.dtype, device="meta")
        for name, state in shapes.items()
    }
    with torch.no_grad(), evaluating(model), trail.watch(model):
        names = ["tokens", "positions", *(["adapters"] if slots else []), *states, *parameters]
        graph = capture(forward, [tokens, positions, slots, states, parameters], names, trail)
    if row_slots is not None:
        row_slots.of_rows = None
    return graph, recurrent


def forgotten(model: nn.Module, shapes: Mapping[str, StateShape]) -> list[str]:
    """The states that the model does not read where several tokens continue a sequence: it would begin anew."""
    graph, _ = capture_model(model, shapes, CHUNK, True)
    return [value.name for value in graph.inputs if value.name in shapes and not value.users]


def pool_states(graph: Graph, positions: Value, states: Sequence[Value], count: int) -> list[Value]:
    """Reads the step's `states`, inputs so far, from pools of `count` states each, and writes the new ones to them.

    The graph's outputs are the logits and a new state for each of `states`; the writes' results take their place. New
    inputs: `states`, the indices of the sequences' states in the pools, and the pools, which have the states' names.
    Returns the pools.
    """
    logits, *new_states = graph.outputs
    index = Value("states", states[0].shape[:1], torch.int64)
    places = {op: i for i, op in enumerate(graph.ops)}
    after: dict[int, list[Op]] = {}
    before: dict[int, list[Op]] = {}
    pools, written = [], []
    for state, new in zip(states, new_states):
        assert isinstance(new, Value) and new.producer is not None, "a new state is computed"
        if (new.shape, new.dtype) != (state.shape, state.dtype):
            raise ValueError(f"the state `{state.name}` is {state}, and after a step {new} of {new.dtype}")
        pool = Value(state.name, (count, *state.shape[1:]), state.dtype)
        pools.append(pool)
        first = min(places[user] for user in state.users)
        state.name, state.index = f"{pool.name}.read", 0
        state.producer = read = Op(state.name, READ_STATE, THREE, {}, [pool, index, positions], [state])
        write = Op(f"{pool.name}.written", WRITE_STATE, THREE, {}, [pool, index, new], [])
        write.results = [Value(write.name, index.shape, index.dtype, write)]
        written.append(write.results[0])
        layer = Place(new.producer.module, new.producer.place.layer)
        read.place = write.place = layer
        before.setdefault(first, []).append(read)
        after.setdefault(max(first, places[new.producer]), []).append(write)
    graph.ops = [each for i, op in enumerate(graph.ops) for each in (*before.get(i, ()), op, *after.get(i, ()))]
    graph.outputs = [logits, *written]
    graph.inputs = [value for value in graph.inputs if value not in set(states)] + [index, *pools]
    graph.number_inputs()
    graph.refresh_users()
    return pools
