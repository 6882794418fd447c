"""Counting the bytes that a rank sends and holds while it runs, for comparison with the plan."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from tpshard.parallelism.pricing.cost import wire_bytes

_KINDS = {"all_gather_into_tensor": "all_gather", "all_reduce": "all_reduce", "reduce_scatter_tensor": "reduce_scatter"}


class Tally(TorchDispatchMode):
    """A dispatch mode that counts the bytes a rank sends and holds while it is active.

    It may be entered several times; tensors freed in between count as freed. tensors: the tensors that exist already.
    Compiled code allocates without dispatching, so that its collectives are counted, but not its memory.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__()
        self.sent_bytes = 0
        """Bytes sent to other ranks by all collectives, as `cost.wire_bytes` counts them."""
        self.collectives = 0
        """Number of collectives, without those of the training loop."""
        self.held_bytes = self.peak_bytes = 0
        """Bytes of the storages of all counted tensors, current and maximal."""
        self._live: dict[int, int] = {}
        self._take(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            self.collectives += func.overloadpacket.__name__ != "wait_tensor"
            self.sent_bytes += _sent_bytes(func.overloadpacket.__name__, args, result)
        self._take(pytree.tree_leaves(result))
        return result

    def _take(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._live:
                continue
            self._live[key] = size
            self.held_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self.held_bytes -= self._live.pop(key, 0)


def _sent_bytes(name: str, args: Any, result: Any) -> int:
    """The bytes that this rank sends for a collective of `_c10d_functional`; 0 for a wait."""
    name = name.removesuffix("_out").removesuffix("_")  # variants that a compiler uses
    if name == "wait_tensor":
        return 0
    group = distributed_c10d._resolve_process_group(args[-1])
    if name == "all_to_all_single":
        tensor, into = args[0], args[2]
        return (sum(into) - into[group.rank()]) * tensor[:1].numel() * tensor.itemsize
    kind = _KINDS[name]
    buffer = result if kind == "all_gather" else args[0]
    return wire_bytes(kind, buffer.numel() * buffer.itemsize, group.size(), dist.get_backend(group))
