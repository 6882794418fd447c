"""One rank's part of a tensor-parallel server: the partitioned step, on this rank's blocks of weights and cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tpshard.models import build
from tpshard.parallelism.program import Port, Program
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.parallelism.simulate import block
from tpshard.programs.serving import ROWS, step_program
from tpshard.programs.setting import DTYPES
from tpshard.serve.job import Job, Weights
from tpshard.serve.quantized import cached, prepare, rewrite
from tpshard.serve.step import StepInput
from tpshard.serve.stepgraph import fix_rows, pack_weights


class Part:
    """Programs of all sizes over one set of local weights and one part of the cache."""

    def __init__(self, context: Context, job: Job, weights: Weights) -> None:
        model = build(weights.config, dtype=DTYPES[job.dtype])
        programs = {
            rows: step_program(
                model, weights.config, context.mesh, rows=rows, wanted=rows, blocks=job.blocks,
                block_size=job.block_size,
            )
            for rows in sorted(job.rows)
        }  # fmt: skip
        _agree(context, [torch.__version__, *(program.fingerprint for program in programs.values())])
        self._device = context.device
        ports = next(iter(programs.values())).inputs[len(ROWS) :]
        blocks = {p.name: block(p.shape, p.layout, context.mesh, context.rank) for p in ports}
        parts = {name: (b[0], b[1]) for name, b in blocks.items() if name.endswith(".weight") and len(b) == 2}
        self._linears = prepare(
            parts, cached(weights.quantized), job.layout, self._device, DTYPES[job.dtype], job.dense
        )
        self._fixed = [self._value(port, blocks[port.name], weights) for port in ports]
        self._packed: dict[int, Tensor] = {}
        self._steps = {rows: self._prepared(context, program, job) for rows, program in programs.items()}

    def step(self, batch: StepInput) -> Tensor:
        """Logits [wanted, vocab], the same bits on every rank."""
        size = next(n for n in self._steps if n >= len(batch.tokens))
        executor, packed = self._steps[size]
        b = batch.padded(size, size)
        arrays = [b.tokens[None], b.positions[None], b.slots[None], b.sequences[None], b.tables, b.wanted]
        inputs = [torch.from_numpy(np.ascontiguousarray(a)).to(self._device) for a in arrays]
        with torch.inference_mode():
            (logits,) = executor(*inputs, *self._fixed, *packed)
        return logits[: len(batch.wanted)].float().cpu()

    def _value(self, port: Port, part: Sequence[tuple[int, int]], weights: Weights) -> Tensor:
        if ".cache." in port.name:
            return torch.zeros(port.local, dtype=port.dtype, device=self._device)
        linear = self._linears.of.get(port.name)
        if linear is not None:
            nothing = torch.zeros(1, dtype=port.dtype, device=self._device).expand(port.local)
            return nothing if linear.dense is None else linear.dense.to(self._device)
        starts, sizes = zip(*part)
        if port.name in self._linears.turned:
            whole = weights.block(port.name, (0,), port.shape)
            return whole[self._linears.turned[port.name]].to(self._device, port.dtype)
        return weights.block(port.name, starts, sizes).to(self._device, port.dtype).contiguous()

    def _prepared(self, context: Context, program: Program, job: Job) -> tuple[Executor, list[Tensor]]:
        executor = Executor(program, context)
        more: list[Tensor] = []
        if job.batch_invariant or self._linears.of:
            graph = executor.module.graph
            inputs = [node for node in graph.nodes if node.op == "placeholder"][len(ROWS) :]
            names = {node: port.name for node, port in zip(inputs, program.inputs[len(ROWS) :])}
            held = dict(zip(inputs, self._fixed))
            group = context.groups.get((context.mesh.axis("tp"),))

            def all_gather(x: Tensor) -> Tensor:
                parts = [torch.empty_like(x) for _ in range(job.tp)]
                dist.all_gather(parts, x.contiguous(), group=group)
                return torch.cat(parts, -1)

            quantized = [node for node, name in names.items() if name in self._linears.of]
            nodes = fix_rows(graph, None if job.batch_invariant else quantized)
            more = rewrite(graph, nodes, names, self._linears.of, all_gather, job.batch_invariant)
            nodes = [node for node in nodes if not node._erased]
            more += pack_weights(graph, nodes, held.get, self._packed) if job.batch_invariant else []
            executor.module.recompile()
        return executor, more


def _agree(context: Context, what: list[str]) -> None:
    """Compares this rank's programs and versions with the others', as bytes. ValueError where they differ: ranks that
    run different programs wait for each other for ever."""
    digest = hashlib.sha256("\n".join(what).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int32).to(torch.int64)
    largest = mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if context.any(not torch.equal(mine, largest)):
        raise ValueError("the ranks' programs or versions of torch differ; install the same everywhere")
