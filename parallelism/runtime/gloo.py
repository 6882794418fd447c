"""All-gathers on gloo by an op that avoids a data race in torch's gloo backend."""

from __future__ import annotations

import torch
from torch import Tensor

funcol = torch.ops._c10d_functional


def all_gather(sent: Tensor, members: int, group: str) -> Tensor:
    """Starts an all-gather over `group`: [n, ...] of each of `members` ranks -> [members * n, ...].

    `all_gather_into_tensor` without `out` corrupts the heap. After each collective, a thread of torch's gloo (a group
    has two) moves the collective's name, without a lock, into a string that they share (`ProcessGroupGloo::runLoop`,
    `lastCompletedWorkName`; torch 2.11 to 2.13). That op's name, ALLGATHER_COALESCED, is allocated on the heap, so that
    two threads can both free the previous name. The names of all other collectives of a program have at most 15
    characters and are stored inside the string. `benchmarks/torch_gloo_heap.py` shows this without tpshard.
    """
    room = sent.new_empty((members * sent.shape[0], *sent.shape[1:]))
    return funcol.all_gather_into_tensor_out.default(sent, members, group, out=room)
