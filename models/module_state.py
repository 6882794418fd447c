"""What a user's module holds beside its parameters: buffers, and attributes that its forward pass changes.

A step's program is captured once and computes from its inputs alone. So buffers are constants of it, and what a forward
pass would carry to the next step is refused (buffers) or named (attributes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from tpshard.models.construct import Constructor, Unset


class WrittenBuffer(ValueError):
    """A forward pass writes to a buffer."""


STORED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of parameters, and of buffers that are stored like them."""
OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that every module has, such as `training` and its hooks."""


class HeldBuffer(nn.Parameter):
    """A parameter that was a buffer."""


def hold_buffers(model: nn.Module, make: Callable[[], nn.Module]) -> list[str]:
    """Makes the buffers of a module on `meta` constants of its forward pass; returns their names.

    Those of floating-point numbers become parameters that nothing trains: they are stored, sharded and saved, and begin
    with the constructor's values. Others, such as masks and positions, get their values, which the constructor computes
    again where a checkpoint is read. ValueError for others that it leaves empty or draws at random, and for averages
    that a normalization writes in training.
    """
    if averages := list(_averages(model)):
        several = ", ".join(f"`{name}`" for name in averages[:3])
        raise ValueError(f"in training it writes to the buffer {several}; set track_running_stats=False, or eval() it")
    first = {id(buffer): label for label, buffer in model.named_buffers()}
    held: dict[int, Tensor] = {}
    runs: list[Constructor] = []
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if buffer.dtype in STORED:
                del module._buffers[name]
                module._non_persistent_buffers_set.discard(name)
                parameter = held.setdefault(id(buffer), HeldBuffer(buffer.detach().to("meta"), False))
                module.register_parameter(name, parameter)  # type: ignore[arg-type]
            else:
                runs = runs or [Constructor(make, seed) for seed in (0, 1)]
                if id(buffer) not in held:
                    held[id(buffer)] = _fixed(runs, first[id(buffer)])
                module._buffers[name] = held[id(buffer)]
    return list(first.values())


def _fixed(runs: list[Constructor], label: str) -> Tensor:
    """The value of a buffer that two runs of the constructor, from different seeds, agree in."""
    try:
        value, other = (run.value(label) for run in runs)
    except Unset as error:
        raise ValueError(str(error)) from error
    if value is None or other is None:
        raise ValueError(f"its constructor leaves the buffer `{label}` without values")
    if not torch.equal(value, other):
        raise ValueError(f"the buffer `{label}` is drawn at random, and {value.dtype} is not stored; make it fp32")
    return value


def watch_forward(model: nn.Module, buffers: list[str], changed: set[str]) -> None:
    """Lets every forward pass of a module begin from the same attributes: what it changes of them is undone, and their
    names are added to `changed`. One that writes to a buffer raises WrittenBuffer."""
    forward = model.forward

    def checked(*args: Any, **kwargs: Any) -> Any:
        tensors = {label: tensor for label, tensor in _tensors(model) if label in buffers}
        versions = {label: tensor._version for label, tensor in tensors.items()}
        states = [(path, module, dict(_attributes(module))) for path, module in model.named_modules()]
        copies = [{name: _copy(value) for name, value in state.items()} for _, _, state in states]
        try:
            output = forward(*args, **kwargs)
        except TypeError as error:
            assigned = [label for label in buffers if f"as parameter '{label.rpartition('.')[2]}'" in str(error)]
            if not assigned:
                raise
            raise _written(model, assigned) from error
        now = dict(_tensors(model))
        if written := [n for n, t in tensors.items() if now.get(n) is not t or t._version != versions[n]]:
            raise _written(model, written)
        for (path, module, state), copied in zip(states, copies):
            changed.update(f"{path}.{name}" if path else name for name in _restore(module, state, copied))
        return output

    model.forward = checked


def _averages(model: nn.Module) -> Iterator[str]:
    """The averages that normalizations in training write, without the version of a tensor telling it."""
    for path, module in model.named_modules():
        if isinstance(module, _NormBase) and module.training and module.running_mean is not None:
            yield from (f"{path}.{name}" if path else name for name in ("running_mean", "running_var"))


def _written(model: nn.Module, names: list[str]) -> WrittenBuffer:
    several = ", ".join(f"`{name}`" for name in names[:3])
    return WrittenBuffer(f"the forward pass of {type(model).__name__} writes to the buffer {several}")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((name, value) for name, value in vars(module).items() if name not in OF_TORCH and name != "forward")


def _copy(value: Any) -> Any:
    """The contents of a container, which a forward pass can change in place; else the value itself."""
    return value.copy() if type(value) in (list, dict, set) else value


def _restore(module: nn.Module, state: dict[str, Any], copies: dict[str, Any]) -> list[str]:
    """Gives a module the attributes of before; returns the names of those that differed."""
    differed = []
    for name, value in list(_attributes(module)):
        before: Any = state.get(name)
        contents: Any = copies.get(name)
        if name in state and value is before and (contents is before or _same(value, contents)):
            continue
        recomputed = isinstance(before, Tensor) and before.grad_fn is not None  # by a hook, as of `weight_norm`
        if not recomputed and (name not in state or not _same(value, contents)):
            differed.append(name)
        if name not in state:
            delattr(module, name)
            continue
        if contents is not before:
            before.clear()
            before.extend(contents) if isinstance(before, list) else before.update(contents)
        vars(module)[name] = before
    missing = [name for name in state if name not in vars(module)]
    for name in missing:
        vars(module)[name] = state[name]
    return differed + missing


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal, tensors in them identical."""
    (one, first), (two, second) = pytree.tree_flatten(value), pytree.tree_flatten(other)
    return first == second and all(
        a is b or (type(a) is type(b) and isinstance(a, (int, float, complex, str, bytes)) and a == b)
        for a, b in zip(one, two)
    )
