"""Products of many tokens with their experts by torch's grouped product, which a Hopper GPU computes in one kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_MANY = 64
"""Choices of an expert on average from which on sorting the rows themselves pays."""


def by_library(ids: Tensor, count: int, sizes: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether choices of `count` experts with matrices of these sizes are multiplied so: in bf16 on sm_90, for which
    torch has such a kernel, where rows take whole copies of 16 bytes."""
    many = dtype == torch.bfloat16 and ids.is_cuda and ids.numel() >= _MANY * count
    fits = many and not any(size % 8 for size in sizes)
    return fits and torch.cuda.get_device_capability(ids.device) == (9, 0)


class GroupedRows:
    """The choices of all tokens, and their rows in the order of their experts (as `triton_experts.SortedChoices`).

    ids: [..., k]. Choices outside 0 .. count - 1 come last, and nothing is computed for them: their rows hold anything
    until `in_choices` or `combine` makes them zeros.
    """

    def __init__(self, ids: Tensor, count: int) -> None:
        flat = ids.reshape(-1)
        owner = torch.where((flat >= 0) & (flat < count), flat, count)
        owner, self._order = torch.sort(owner, stable=True)
        self._mine = (owner < count)[:, None]
        after = torch.arange(1, count + 1, device=ids.device)
        self._ends = torch.searchsorted(owner, after).int()
        self.places: Tensor | None = torch.empty_like(self._order)
        """int64 [choices]: the row of each choice, -1 for one of which nothing is computed."""
        at = torch.arange(len(flat), device=ids.device)
        self.places[self._order] = torch.where(self._mine[:, 0], at, -1)

    def rows(self, x: Tensor) -> Tensor:
        """x [choices or rows, width], whose rows are shared by their choices, as rows [choices, width]."""
        return x[self._order // (len(self._order) // len(x))]

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """The rows [choices, i] by weight [e, o, i] -> [choices, o]."""
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=self._ends)

    def outer(self, dout: Tensor, rows: Tensor) -> Tensor:
        """The sums of outer products of dout [choices, o] and rows [choices, i] per expert: [e, o, i]."""
        return F.grouped_mm(dout.T, rows, offs=self._ends)

    def in_choices(self, values: Tensor) -> Tensor:
        """The values [choices, width] of rows in the order of choices."""
        out = torch.empty_like(values)
        out[self._order] = values.where(self._mine, 0)
        return out
