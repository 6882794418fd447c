"""All-gathers on gloo, by the one of torch's two ops that its threads can run at the same time."""

from __future__ import annotations

import torch
from torch import Tensor

funcol = torch.ops._c10d_functional


def all_gather(sent: Tensor, members: int, group: str) -> Tensor:
    """Starts a gather over `group`: [n, ...] of each of `members` ranks -> [members * n, ...], to be waited for.

    `all_gather_into_tensor` without `out` corrupts the heap. After each collective, a thread of torch's gloo (a group
    has two) moves the collective's name into a string that they share, without a lock (`ProcessGroupGloo::runLoop`,
    `lastCompletedWorkName`; torch 2.11 to 2.13). That op's name is ALLGATHER_COALESCED, of more characters than a
    string holds in itself, so that two threads which end at the same time both free the memory of the name before. The
    names of all other collectives that a program issues have at most 15 characters: they are copied within the string
    and own no memory. `benchmarks/torch_gloo_heap.py` shows it without tpshard.
    """
    room = sent.new_empty((members * sent.shape[0], *sent.shape[1:]))
    return funcol.all_gather_into_tensor_out.default(sent, members, group, out=room)
