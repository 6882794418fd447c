"""Fake tensors without torch's compiler of Python code.

Everything that runs on fake tensors imports `torch._dynamo`, which takes longer than the plan of a small model: a fake
mode reads two of its settings, and operations written in Python are marked as what it must not compile. Where nothing
else has imported it, the package is loaded only when something needs more than that.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_mode() -> FakeTensorMode:
    """A new mode in which operations compute shapes and dtypes alone; tensors that are not fake may be operands."""
    if "torch._dynamo" not in sys.modules:
        torch._dynamo = defer("torch._dynamo", "config")
    if threading.current_thread() is not threading.main_thread():
        _keep_device_guard()
    return FakeTensorMode(allow_non_fake_inputs=True)


@functools.cache
def _keep_device_guard() -> None:
    """Keeps what a torch that is built for CUDA uses in place of a device where there is no GPU.

    It belongs to the first thread that enters a fake mode, and torch goes on to use it when this thread has ended,
    which is a segmentation fault: a thread that never ends enters first.
    """
    if torch.version.cuda is None or torch.cuda.is_available():
        return
    entered = threading.Event()

    def keep() -> None:
        with FakeTensorMode():
            entered.set()
        threading.Event().wait()

    threading.Thread(target=keep, name="device-guard", daemon=True).start()
    entered.wait()


@contextmanager
def uncompiled() -> Iterator[None]:
    """A context in which `torch.compile` and torch's control flow run eagerly, since what fails to compile in a mode is
    never tried again. The compiler is not loaded for this; one that is loaded in the context obeys it."""
    with ExitStack() as stack:

        def forbid() -> None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))

        if (deferral := _deferral_of("torch._dynamo")) is None:
            forbid()
            yield
            return
        deferral.then.append(forbid)
        stack.callback(deferral.then.remove, forbid)
        yield


def defer(package: str, *apart: str) -> ModuleType:
    """Imports a package that is loaded at the first use of what `Deferred` lacks, or of a module not in `apart`."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    module = sys.modules[package] = importlib.util.module_from_spec(spec)
    module.__class__ = Deferred
    sys.meta_path.insert(0, _Submodules(package, apart))
    return module


class Deferred(ModuleType):
    """The package before it is loaded, with what fake tensors and process groups ask of it."""

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def disable(fn: Callable[..., Any], recursive: bool = True, **_: Any) -> Callable[..., Any]:
        """The function, run without a compiler that looks at its frames."""

        @functools.wraps(fn)
        def uncompiled(*args: Any, **kwargs: Any) -> Any:
            before = set_eval_frame(None)
            try:
                return fn(*args, **kwargs)
            finally:
                set_eval_frame(before)

        return uncompiled

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of all modules by those who look for one
            raise AttributeError(name)
        deferral = _deferral_of(self.__name__)
        assert deferral is not None
        deferral.load()
        return getattr(self, name)


def _deferral_of(package: str) -> _Submodules | None:
    """What will load a package; None for one that is loaded, or was never deferred."""
    return next((one for one in sys.meta_path if isinstance(one, _Submodules) and one.package == package), None)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a deferred package before any of its modules but those `apart`, as each import of a module does."""

    def __init__(self, package: str, apart: tuple[str, ...]) -> None:
        self.package, self.apart = package, [f"{package}.{name}" for name in apart]
        self.then = list[Callable[[], None]]()
        """Called once the package is loaded."""

    def load(self) -> None:
        """Loads the package in place."""
        sys.meta_path.remove(self)
        module = sys.modules[self.package]
        module.__class__ = ModuleType  # type: ignore[assignment]
        assert module.__spec__ is not None and module.__spec__.loader is not None
        module.__spec__.loader.exec_module(module)
        for call in [*self.then]:
            call()

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{self.package}.") or name in self.apart:
            return None
        self.load()
        if (module := sys.modules.get(name)) is None:
            return None
        # the package has imported it: the import that asked finishes with the module as it is
        self.own, module.__spec__ = module.__spec__, importlib.util.spec_from_loader(name, self)
        return module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own
