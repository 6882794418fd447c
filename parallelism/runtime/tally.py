"""What a rank really sends and holds while it runs: counted as operations are dispatched, to be held against a plan."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_out")


class Tally(TorchDispatchMode):
    """Counts while it is entered. It may be entered several times; what is freed in between counts as freed.

    `held`: tensors that are there already. Code that a compiler made allocates without dispatching: its memory is not
    seen, its collectives are.
    """

    def __init__(self, held: Iterable[Tensor]):
        super().__init__()
        self.sent_bytes = 0
        """Of the buffers of all collectives: what an all-gather makes, what any other one is given."""
        self.held_bytes = self.peak_bytes = 0
        """Of the storages of all tensors seen, now and at most."""
        self._live: dict[int, int] = {}
        self._take(held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            name = func.overloadpacket.__name__
            if not name.startswith("wait_tensor"):
                buffer = made if name in _GATHERS else args[0]
                self.sent_bytes += buffer.numel() * buffer.itemsize
        self._take(pytree.tree_leaves(made))
        return made

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
            weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self.held_bytes -= self._live.pop(key, 0)
