"""The values that a module's constructor gives its parameters, one parameter at a time.

The constructor runs once, on the CPU and in fp32 as `torch.manual_seed(seed); Class(...)`, but on tensors without
storage: what it does is recorded, with the state of the random numbers before each draw. A parameter's value is then
computed by the recorded operations that it depends on. A rank needs memory for one parameter, not for the model.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from tpshard.kernels.fake_mode import fake_mode

aten = torch.ops.aten
UNSET = {
    aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default,
    aten.empty_like.default,
}  # fmt: skip
"""Operations whose result has no values yet."""
CONSTANTS = {aten.fill_.Scalar, aten.zero_.default}
OVERWRITES = {aten.normal_.default, aten.uniform_.default, *CONSTANTS}
"""Operations after which nothing is left of what their first argument was."""


class Unset(Exception):
    """A constructor sets some values of a parameter and not all."""


class StorageView(NamedTuple):
    """A tensor of the recorded run: a view of a storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    whole: bool
    """Whether it has all elements of its storage."""


@dataclass(frozen=True)
class TapeEntry:
    """One recorded operation, with `StorageView`s for tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[StorageView, ...]
    """Those with a storage of their own."""
    writes: frozenset[int]
    reads: frozenset[int]
    state: Tensor | int | None
    """The state of the random numbers before it, or a seed; None if it draws none."""


class Constructor:
    """The recorded run of a constructor. `value` computes a parameter, or a buffer that is stored.

    With `keyed`, each operation that draws has a seed of its own instead of the numbers after those of the one before:
    nothing is drawn until a value is asked for, which is what large models need.
    """

    def __init__(self, make: Callable[[], nn.Module], seed: int, *, keyed: bool = False):
        self._values: dict[str, Tensor] = {}
        self._refs: dict[str, StorageView] = {}
        self._tape: list[TapeEntry] = []
        recorder = _Recorder(seed if keyed else None)
        try:
            with _seeded(seed), fake_mode(), recorder:
                self._refs = {name: recorder.ref(value) for name, value in _stored(make())}
                self._tape = recorder.tape
        except Exception:  # such as numpy, which reads storages: all values at once
            with _seeded(seed), _Marked():
                self._values = {name: value.detach() for name, value in _stored(make())}

    def sets(self, name: str) -> bool:
        """Whether the constructor sets a value, or a part of it."""
        if name in self._values:
            return not _is_missing(self._values[name]).all()
        return any(entry.func not in UNSET for entry in self._needed_by(name))

    def filled(self, name: str) -> tuple[TapeEntry, ...] | None:
        """The operation of OVERWRITES that fills a value, and those that fill parts of it then; None for others."""
        entries = () if name in self._values else self._needed_by(name)
        whole = [i for i, e in enumerate(entries) if e.func in OVERWRITES and e.args[0].whole]
        last = tuple(entries[whole[-1] :]) if whole else ()
        constant = all(entry.func in CONSTANTS and _is_contiguous(entry.args[0]) for entry in last[1:])
        return last if last and constant else None

    def value(self, name: str) -> Tensor | None:
        """The value of a parameter; None if the constructor sets none. Raises Unset if it sets a part."""
        if name in self._values:
            value = self._values[name].clone()
        else:
            ref = self._refs[name]
            if not self.sets(name):
                return None
            value = _computed(self._needed_by(name), ref)
        missing = _is_missing(value)
        if missing.any() and not missing.all():
            raise Unset(f"the constructor sets {int((~missing).sum())} of the {missing.numel()} values of `{name}`")
        return None if missing.all() and missing.numel() else value

    def _needed_by(self, name: str) -> list[TapeEntry]:
        return _needed(self._tape, self._refs[name].storage)


def _is_missing(value: Tensor) -> Tensor:
    """Which elements have no value, bool."""
    return value.isnan() if value.is_floating_point() else torch.zeros_like(value, dtype=torch.bool)


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a model, by name; tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


class _Recorder(TorchDispatchMode):
    """Records every operation, and draws the random numbers of those that draw, so that later ones are the same."""

    def __init__(self, seed: int | None) -> None:
        """seed: that from which the seeds of single operations are made; None: they draw one after another."""
        super().__init__()
        self.tape: list[TapeEntry] = []
        self._seed = seed
        self._alive: list[Tensor] = []
        """Every tensor seen: their storages keep their numbers."""

    def ref(self, tensor: Tensor) -> StorageView:
        self._alive.append(tensor)
        storage, size, stride = tensor.untyped_storage(), tuple(tensor.shape), tuple(tensor.stride())
        whole = tensor.numel() * tensor.dtype.itemsize == storage.nbytes()
        return StorageView(storage._cdata, size, stride, int(tensor.storage_offset()), tensor.dtype, whole)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refs = pytree.tree_map(self._read, (args, kwargs))
        if func is aten._local_scalar_dense.default and _is_ref(refs[0][0]):  # Python reads a value
            with no_dispatch():
                return _computed(_needed(self.tape, refs[0][0].storage), refs[0][0]).item()
        written = {ref.storage for ref in self._written(func, *refs)}
        read = {leaf.storage for leaf in _leaves(refs)}
        state = self._draw(func, refs) if torch.Tag.nondeterministic_seeded in func.tags else None
        out = func(*args, **kwargs)
        made = tuple(ref for ref in map(self.ref, _tensors(out)) if ref.storage not in read)
        if made or written:
            writes = frozenset(written | {ref.storage for ref in made})
            self.tape.append(TapeEntry(func, refs[0], refs[1], made, writes, frozenset(read), state))
        return out

    def _read(self, argument: Any) -> Any:
        return self.ref(argument) if isinstance(argument, FakeTensor) else argument

    def _written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[StorageView]:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _leaves(kwargs.get(argument.name, args[i] if i < len(args) else None))

    def _draw(self, func: Any, refs: Any) -> Tensor | int:
        """Draws as often as the operation will; returns the state before, or the operation's own seed."""
        if refs[1].get("generator") is not None:
            raise ValueError("a generator of its own")
        if self._seed is not None:
            digest = hashlib.sha256(f"{self._seed}:{len(self.tape)}".encode()).digest()
            return int.from_bytes(digest[:8], "little", signed=True)
        with no_dispatch():
            args, kwargs = pytree.tree_map(_blank, refs, is_leaf=_is_ref)
            before = torch.get_rng_state()
            func(*args, **kwargs)
            return before


class _Marked(TorchDispatchMode):
    """Fills every tensor that is made without values with NaN."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.fill_(float("nan")) if func in UNSET and out.is_floating_point() else out


def _needed(tape: Sequence[TapeEntry], storage: int) -> list[TapeEntry]:
    """The recorded operations on which a storage's last values depend, in order."""
    needed, kept = {storage}, []
    whole: set[int] = set()
    """The storages of which only the making is needed, because all elements are overwritten later."""
    for entry in reversed(tape):
        made = {ref.storage for ref in entry.results}
        if not entry.writes & needed and not made & whole:
            continue
        kept.append(entry)
        target = entry.args[0] if entry.func in OVERWRITES else None
        if target is not None and target.whole:
            needed.discard(target.storage)
            whole.add(target.storage)
        else:
            needed |= entry.reads
    return kept[::-1]


def _computed(entries: Sequence[TapeEntry], ref: StorageView) -> Tensor:
    """The value that recorded operations give a tensor."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return _view(_replay(entries), ref).clone()


def _replay(entries: Sequence[TapeEntry]) -> dict[int, Tensor]:
    """Runs recorded operations; returns the storages that they made, as flat tensors."""
    storages: dict[int, Tensor] = {}

    def real(ref: Any) -> Any:
        return _view(storages, ref) if isinstance(ref, StorageView) else ref

    for entry in entries:
        if isinstance(entry.state, Tensor):
            torch.set_rng_state(entry.state)
        elif entry.state is not None:
            torch.default_generator.manual_seed(entry.state)
        args, kwargs = pytree.tree_map(real, (entry.args, entry.kwargs), is_leaf=_is_ref)
        if entry.func in UNSET:
            kwargs = {**kwargs, "device": "cpu"}
        out = entry.func(*args, **kwargs)
        for ref, tensor in zip(entry.results, (t for t in _tensors(out)), strict=False):
            if entry.func in UNSET and tensor.is_floating_point():
                tensor.fill_(float("nan"))
            storages[ref.storage] = tensor
    return storages


def _view(storages: dict[int, Tensor], ref: StorageView) -> Tensor:
    made = storages[ref.storage]
    return made if made.dtype != ref.dtype else torch.as_strided(made, ref.size, ref.stride, ref.offset)


def _blank(argument: Any) -> Any:
    """A tensor of the shape and strides of a `StorageView`, of halves, which are probabilities too."""
    if not isinstance(argument, StorageView):
        return argument
    made = torch.empty_strided(argument.size, argument.stride, dtype=argument.dtype)
    return made.fill_(0.5) if argument.dtype.is_floating_point else made.zero_()


def _is_ref(argument: Any) -> bool:
    return isinstance(argument, StorageView)


def _is_contiguous(ref: StorageView) -> bool:
    """Whether the elements of a view follow one another in its storage."""
    steps = [math.prod(ref.size[i + 1 :]) for i in range(len(ref.size))]
    return all(size == 1 or step == stride for size, step, stride in zip(ref.size, steps, ref.stride))


def _leaves(tree: Any) -> list[StorageView]:
    return [leaf for leaf in pytree.tree_leaves(tree, is_leaf=_is_ref) if isinstance(leaf, StorageView)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """A context in which torch, numpy and Python draw random numbers from a seed; afterwards as before."""
    states = random.getstate(), np.random.get_state()
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_default_dtype(default)
