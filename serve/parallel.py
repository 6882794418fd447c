"""One rank's part of a tensor-parallel server: the partitioned step, on this rank's blocks of weights and cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, fx
from tpshard.kernels.direct import call_directly
from tpshard.models import build
from tpshard.parallelism.program import Port, Program
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.parallelism.simulate import block
from tpshard.programs.layouts import act_orders
from tpshard.programs.padding import padded, shared_rows
from tpshard.programs.serving import ROWS, step
from tpshard.programs.setting import DTYPES
from tpshard.serve.fusion import fuse
from tpshard.serve.gates import join_gates
from tpshard.serve.job import Job, Weights
from tpshard.serve.padding import pad
from tpshard.serve.quantized import Inputs, cached, prepare, rewrite
from tpshard.serve.step import StepInput
from tpshard.serve.stepgraph import fix_rows, pack_weights


class Part:
    """Programs of all sizes over one set of local weights and one part of the cache."""

    def __init__(self, context: Context, job: Job, weights: Weights) -> None:
        dtype = DTYPES[job.dtype]
        shared = shared_rows(weights.config, weights.group)
        weights = pad(weights, padded(weights.config, context.mesh.ranks, shared))
        model = build(weights.config, dtype=dtype)
        group = lru_cache(maxsize=None)(weights.group)
        matrices = [name for name, p in model.named_parameters() if p.dim() == 2]
        orders = act_orders(model, weights.config, group)
        steps = {
            rows: step(
                model, weights.config, context.mesh, rows=rows, wanted=rows, blocks=job.blocks,
                block_size=job.block_size, orders=orders, layout=job.layout,
            )
            for rows in sorted(job.rows)
        }  # fmt: skip
        _agree(context, [torch.__version__, *(one.program.fingerprint for one in steps.values())])
        self._device = context.device
        first = next(iter(steps.values()))
        ports = first.program.inputs[len(ROWS) :]
        blocks = {p.name: block(p.shape, p.layout, context.mesh, context.rank) for p in ports}
        parts = {name: (blocks[name][0], blocks[name][1]) for name in matrices}
        self._linears = prepare(parts, cached(weights.quantized), group, first.arrangement, self._device)
        self._fixed = [self._value(port, blocks[port.name], weights) for port in ports]
        self._packed: dict[int, Tensor] = {}
        self._used = torch.zeros(1, dtype=torch.int64) if self._device.type == "cpu" else None
        """Rows of a step that are not padding."""
        self._steps = {rows: self._prepared(context, one.program, job) for rows, one in steps.items()}
        self._let_go()

    def step(self, batch: StepInput) -> Tensor:
        """Logits [wanted, vocab], the same bits on every rank."""
        size = next(n for n in self._steps if n >= len(batch.tokens))
        executor, packed = self._steps[size]
        b = batch.padded(size, size)
        if self._used is not None:
            self._used.fill_(len(batch.tokens))
        arrays = [b.tokens[None], b.positions[None], b.slots[None], b.sequences[None], b.tables, b.wanted]
        inputs = [torch.from_numpy(np.ascontiguousarray(a)).to(self._device) for a in arrays]
        with torch.inference_mode():
            (logits,) = executor(*inputs, *self._fixed, *packed)
        return logits[: len(batch.wanted)].float().cpu()

    def _value(self, port: Port, part: Sequence[tuple[int, int]], weights: Weights) -> Tensor:
        if ".cache." in port.name:
            return torch.zeros(port.local, dtype=port.dtype, device=self._device)
        if port.name in self._linears.of:  # its codes are further inputs
            return torch.zeros(1, dtype=port.dtype, device=self._device).expand(port.local)
        starts, sizes = zip(*part)
        if port.name in self._linears.arrangement.inputs:
            return self._linears.order(port.name, starts[0], sizes[0]).to(self._device)
        value = self._linears.parameter(port.name, starts, sizes, weights.block)
        return value.to(self._device, port.dtype).contiguous()

    def _prepared(self, context: Context, program: Program, job: Job) -> tuple[Executor, list[Tensor]]:
        executor = Executor(program, context)
        fuse(executor.module.graph, self._device)
        executor.module.recompile()
        if not job.batch_invariant and not self._linears.of:
            return executor, []
        graph = executor.module.graph
        inputs = _inputs(executor)[len(ROWS) :]
        names = {node: port.name for node, port in zip(inputs, program.inputs[len(ROWS) :])}
        held = dict(zip(inputs, self._fixed))
        more = Inputs(graph)
        quantized = [node for node, name in names.items() if name in self._linears.of]
        nodes = fix_rows(graph, None if job.batch_invariant else quantized)
        join_gates(nodes, names, self._linears, more, job.batch_invariant)
        nodes = [node for node in nodes if not node._erased]
        rewrite(nodes, names, self._linears.of, more, job.batch_invariant, self._used)
        nodes = [node for node in nodes if not node._erased]
        packed: list[Tensor] = []
        if job.batch_invariant:
            packed = pack_weights(graph, nodes, held.get, self._packed)
        if self._device.type == "cpu":
            call_directly(graph)
        executor.module.recompile()
        return executor, [*more.tensors, *packed]

    def _let_go(self) -> None:
        """Frees the weights that no program reads any more, since packed ones replaced them."""
        for i, held in enumerate(self._fixed):
            nodes = (_inputs(executor)[len(ROWS) + i] for executor, _ in self._steps.values())
            if not any(node.users for node in nodes):
                self._fixed[i] = held.new_zeros(1).expand(held.shape)


def _inputs(executor: Executor) -> list[fx.Node]:
    return [node for node in executor.module.graph.nodes if node.op == "placeholder"]


def _agree(context: Context, what: list[str]) -> None:
    """Compares this rank's programs and versions with the others', as bytes. ValueError where they differ: ranks that
    run different programs wait for each other for ever."""
    digest = hashlib.sha256("\n".join(what).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int32).to(torch.int64)
    largest = mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if context.any(not torch.equal(mine, largest)):
        raise ValueError("the ranks' programs or versions of torch differ; install the same everywhere")
