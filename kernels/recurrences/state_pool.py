"""The states of recurrent layers, one per sequence, in pools that a server's steps read and write.

    tpshard::read_state(pool [n, ...], states [m], positions [1, rows]) -> [m, ...]
    tpshard::write_state(pool [n, ...], states [m], values [m, ...]) -> [m], the states

`states` are indices of the pool. A step has one row for each of m sequences, or all rows are of one sequence (m = 1).
Where a sequence's first row has position 0, its state is zeros, whatever the pool holds. State 0 belongs to no
sequence: padding rows write to it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tpshard.kernels.operation import operation


def _read(pool: Tensor, states: Tensor, positions: Tensor) -> Tensor:
    begins = positions.reshape(len(states), -1)[:, 0] == 0
    return pool.index_select(0, states).masked_fill_(begins.view(-1, *[1] * (pool.dim() - 1)), 0)


def _write(pool: Tensor, states: Tensor, values: Tensor) -> Tensor:
    pool.index_copy_(0, states, values)
    return states.clone()


def _shape(pool: Tensor, states: Tensor, positions: Tensor) -> Tensor:
    return pool.new_empty(len(states), *pool.shape[1:])


def _shape_of_written(pool: Tensor, states: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(states)


READ_STATE = operation("read_state(Tensor pool, Tensor states, Tensor positions) -> Tensor", _read, _shape)
WRITE_STATE = operation(
    "write_state(Tensor(a!) pool, Tensor states, Tensor values) -> Tensor", _write, _shape_of_written
)
