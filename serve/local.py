"""A runner on one device: the plain model, traced, over a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from tpshard.kernels.direct import call_directly
from tpshard.kernels.rows_linear import TILE
from tpshard.models.config import ModelConfig
from tpshard.programs.serving import make_pools
from tpshard.serve.cuda_graphs import Replayed
from tpshard.serve.fusion import fuse
from tpshard.serve.gates import join_gates
from tpshard.serve.quantized import Inputs, Linears, reorder_inputs, rewrite
from tpshard.serve.step import StepInput
from tpshard.serve.stepgraph import fix_rows, let_go, pack_weights, trace


class LocalRunner:
    """Computes steps of `model` (on its device, in its dtype) in this process.

    With `batch_invariant` every product has the same shape whatever the batch, so that a token's logits do not
    depend on the other rows; without it the library chooses by the number of rows. `linears` are the weights that are
    multiplied quantized; the model's own values of these are not read, and all others lie as its arrangement says.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        blocks: int,
        block_size: int = 16,
        max_rows: int = 128,
        batch_invariant: bool = True,
        max_seq: int | None = None,
        linears: Linears | None = None,
    ) -> None:
        if max_rows % TILE:
            raise ValueError(f"{max_rows} rows a step are not a multiple of {TILE}")
        config: ModelConfig = model.config  # type: ignore[assignment]
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        first = next(iter(parameters.values()))
        pools = make_pools(config, blocks, block_size, first.dtype, first.device)
        self.blocks, self.block_size, self.device = blocks, block_size, first.device
        self.vocab, self.max_seq = config.vocab, max_seq or config.max_seq
        self.max_rows = self.max_wanted = max_rows
        self.cache_bytes = sum(k.nbytes + v.nbytes for k, v in pools)
        self._used = torch.zeros(1, dtype=torch.int64) if self.device.type == "cpu" else None
        """Rows of a step that are not padding."""
        graph = trace(model, pools, parameters)
        self._fixed = pytree.tree_leaves((pools, parameters))
        if batch_invariant or linears is not None:
            inputs = [node for node in graph.nodes if node.op == "placeholder"]
            weights = dict(zip(inputs[-len(self._fixed) :], self._fixed))
            names = dict(zip(inputs[-len(parameters) :], parameters))
            more = Inputs(graph)
            quantized = [node for node, name in names.items() if linears is not None and name in linears.of]
            nodes = fix_rows(graph, None if batch_invariant else quantized)
            if linears is not None:
                reorder_inputs(nodes, names, linears, more, self.device)
                join_gates(nodes, names, linears, more, batch_invariant)
                nodes = [node for node in nodes if not node._erased]
                rewrite(nodes, names, linears.of, more, batch_invariant, self._used)
            nodes = [node for node in nodes if not node._erased]
            packed = pack_weights(graph, nodes, weights.get, {}) if batch_invariant else []
            self._fixed = [*let_go(graph, list(weights), list(weights.values())), *more.tensors, *packed]
        fuse(graph, self.device)
        if self.device.type == "cpu":
            call_directly(graph)
        self._program = fx.GraphModule(nn.Module(), graph)
        self._replayed: Replayed | None = None
        if self.device.type == "cuda":
            self._replayed = Replayed(self._program, self._fixed, -(-self.max_seq // block_size))

    @torch.no_grad()
    def step(self, batch: StepInput) -> Tensor:
        b = batch.padded(_up(len(batch.tokens)), _up(len(batch.wanted)))
        if self._used is not None:
            self._used.fill_(len(batch.tokens))
        arrays = [b.tokens[None], b.positions[None], b.slots[None], b.sequences[None], b.tables, b.wanted]
        inputs = [torch.from_numpy(a).to(self.device) for a in arrays]
        logits = self._program(*inputs, *self._fixed) if self._replayed is None else self._replayed(*inputs)
        return logits[: len(batch.wanted)].float().cpu()

    def close(self) -> None:
        self._replayed = None
        self._fixed.clear()


def _up(rows: int) -> int:
    return max(1, -(-rows // TILE)) * TILE
