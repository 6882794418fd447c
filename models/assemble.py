"""Building a module from a configuration, or from a user's own class."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from tpshard.models import module_init
from tpshard.models.construct import Constructor, Unset
from tpshard.models.dims import param_dims
from tpshard.models.families.config import ModelConfig
from tpshard.models.families.decoder import Decoder
from tpshard.models.initialization import fill, init_plan, initial_block, initialize, key_of
from tpshard.models.module_state import STORED, hold_buffers, watch_forward
from tpshard.models.own_code import line_of, one_line


def build(
    config: ModelConfig, *, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32, seed: int = 0
) -> nn.Module:
    """The model of `config`: tokens [batch, seq] -> logits [batch, seq, vocab].

    On `meta` it has only shapes; on a real device it has the initial values of `seed`.
    """
    return _place(lambda: Decoder(config), device, dtype, seed)


def build_module(
    path: str,
    args: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    changed: set[str] | None = None,
) -> nn.Module:
    """An instance of the user's class `package.module:Class`, called with `args`.

    The package is imported as by `python -m`, with the working directory searched too. Its buffers are constants
    (`module_state`). changed: gets the names of the attributes that a forward pass changes.

    ValueError if it cannot be imported, is not an nn.Module, has parameters that are no real numbers, names dims that
    no parameter has (`param_dims`) or wrong initial values (`module_init`), or if `forward` takes neither (tokens,
    documents, positions) nor the names in its attribute `inputs`.
    """
    make = _constructor_of(path, args)
    model = _on_meta(make, path)
    if loose := [label for label, _ in _loose_tensors(model)]:
        raise ValueError(
            f"`module: {path}` holds the tensors {', '.join(loose)}, which are neither parameters nor buffers: "
            "register them as buffers, or compute them in forward"
        )
    if lazy := [label for label, p in model.named_parameters() if is_lazy(p)]:
        raise ValueError(f"`module: {path}` has parameters without a shape yet: {', '.join(lazy)}; name their sizes")
    hooked = [label for label, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise ValueError(
            f"`module: {path}` has hooks on gradients of {', '.join(hooked)}, which would not run; change the "
            "gradient in forward, by a torch.autograd.Function"
        )
    known = {torch.float32, torch.bfloat16, torch.float16, torch.get_default_dtype()}
    others = [f"{label} ({p.dtype})" for label, p in model.named_parameters() if p.dtype not in known]
    if others:
        raise ValueError(f"`module: {path}` has parameters that are not fp32, bf16 or fp16: {', '.join(others)}")
    try:
        buffers = hold_buffers(model, make)
    except ValueError as error:
        raise ValueError(f"`module: {path}`: {error}") from error
    for parameter in model.parameters():  # and not `model.to`, which would round constants of float64 too
        parameter.data = parameter.data.to(dtype)
    param_dims(model)
    module_init.check(model, path)
    inputs = getattr(model, "inputs", ("tokens", "documents=None", "positions=None"))
    try:
        inspect.signature(model.forward).bind(*[None] * len(inputs))
    except TypeError as error:
        raise ValueError(f"`module: {path}`: the model must define forward({', '.join(inputs)})") from error
    if torch.device(device).type != "meta":
        return fill(model, ModuleValues(path, args, model, seed).block, device)
    watch_forward(model, buffers, set() if changed is None else changed)
    return model


def own_dtypes(path: str, args: Mapping[str, Any] | None = None) -> dict[str, torch.dtype]:
    """The dtypes that a user's constructor gives parameters, by name, where it gives them several; else none, and all
    are used in the recipe's."""
    model = _on_meta(_constructor_of(path, args), path)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    dtypes |= {name: buffer.dtype for name, buffer in model.named_buffers() if buffer.dtype in STORED}
    return dtypes if len(set(dtypes.values())) > 1 else {}


class ModuleValues:
    """The initial values of a user's module.

    A parameter has those of its constructor (see `models.construct`), unless a module names a function for it in
    `init_functions` or a standard deviation in `initial_std`. One that the constructor leaves empty has those of
    `models.init`.
    """

    def __init__(self, path: str, args: Mapping[str, Any] | None, model: nn.Module, seed: int):
        self.path, self.plan, self.seed = path, init_plan(model), seed
        self._functions, self._stds = module_init.functions(model), module_init.spreads(model)
        self._constructor = Constructor(_constructor_of(path, args), seed)

    def block(self, name: str, starts: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A block of a parameter's initial value. ValueError if the constructor or a function sets a part of
        it."""
        try:
            if name in self._functions:
                value: Tensor | None = module_init.value(
                    self._functions[name], name, self.plan[name].shape, key_of(self.seed, name)
                )
            else:
                value = None if name in self._stds else self._constructor.value(name)
        except Unset as error:
            raise ValueError(f"`module: {self.path}`: {error}") from error
        if value is None:
            return initial_block(self.plan, name, starts, sizes, self.seed, dtype)
        return value[tuple(slice(start, start + size) for start, size in zip(starts, sizes))].to(dtype)


def _constructor_of(path: str, args: Mapping[str, Any] | None) -> Callable[[], nn.Module]:
    cls = import_object("module", path)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"`module: {path}` is not a class of torch modules")
    return lambda: cls(**(args or {}))


def _on_meta(make: Callable[[], nn.Module], path: str) -> nn.Module:
    """A user's module on `meta`. Where its constructor reads the values of tensors, only parameters are on `meta`.

    ValueError, with the line of its code, for a constructor that fails.
    """
    try:
        with torch.device("meta"):
            return make()
    except (NotImplementedError, RuntimeError):
        pass
    except Exception as error:
        raise _failed(path, error) from error
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is, is shared with another module
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    try:
        with mock.patch.object(nn.Module, "register_parameter", on_meta), torch.random.fork_rng(devices=[]):
            return make()
    except Exception as error:
        raise _failed(path, error) from error


def _failed(path: str, error: Exception) -> ValueError:
    if isinstance(error, TypeError) and line_of(error) is None:
        return ValueError(f"`module: {path}` does not take these args: {error}")
    return ValueError(f"`module: {path}`: its constructor fails: {one_line(error)}")


def _loose_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that modules hold beside parameters and buffers, also in lists and dicts, by the attribute's path;
    not those computed from parameters, which a hook computes anew."""
    own = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and id(leaf) not in own and leaf.grad_fn is None:
                    yield f"{path}.{name}" if path else name, leaf


@contextmanager
def without_checkpointing() -> Iterator[None]:
    """A context in which `torch.utils.checkpoint` just calls its function: `remat` says what is recomputed."""

    def call(*_: Any, **__: Any) -> Iterator[None]:
        yield

    reentrant = SimpleNamespace(apply=lambda function, _, *args: function(*args))
    with (
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", call),
        mock.patch.object(checkpoint, "CheckpointFunction", reentrant),
    ):
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which the modules of a model compute as after training: nothing is dropped."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _Here:
    """Finds modules in the working directory that are nowhere else, but none with the name of one of Python's own, such
    as `_winapi`: Python's modules ask for those that its other systems have."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if path is not None or name in sys.stdlib_module_names:
            return None
        return PathFinder.find_spec(name, [os.getcwd()])


def import_object(key: str, path: str) -> Any:
    """The object at `package.module:Class`, also of a module in the working directory. ValueError naming the recipe's
    key where it cannot be imported."""
    package, colon, attribute = path.partition(":")
    if not (colon and package and attribute):
        raise ValueError(f"`{key}: {path}` is not of the form package:Class")
    try:
        if _Here not in sys.meta_path:
            sys.meta_path.append(_Here)
        target: Any = importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"`{key}: {path}`: {error}") from error
    except Exception as error:  # the package's own code, or its syntax
        raise ValueError(f"`{key}: {path}` cannot be imported: {one_line(error)}") from error
    try:
        for part in attribute.split("."):
            target = getattr(target, part)
    except AttributeError as error:
        raise ValueError(f"`{key}: {path}`: {package} has no {attribute}{_other_file(package)}") from error
    return target


def _other_file(package: str) -> str:
    """What to add where the working directory has a file of an imported module's name that is not this module."""
    own, found = Path(*package.split(".")).with_suffix(".py"), getattr(sys.modules[package], "__file__", None)
    if not own.is_file() or (found is not None and os.path.realpath(found) == os.path.realpath(own)):
        return ""
    return f"; it is {found or 'a module of Python'}, found before ./{own}: give your file another name"


def _place(make: Any, device: torch.device | str, dtype: torch.dtype, seed: int) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = make()
    model = model.to(dtype)
    return model if torch.device(device).type == "meta" else initialize(model, seed, device)
