"""A deferred package is loaded once and in its own order, when more of it is used than `Deferred` has."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from forked import python
from tpshard.kernels import fake_mode
from tpshard.kernels.fake_mode import Deferred, defer

PACKAGE = {
    "__init__": "from . import config, other\nVALUE = 1", "config": "", "other": "from . import config",
}  # fmt: skip


@pytest.mark.parametrize("used", ["a value", "a module", "a module by the package's name"])
def test_a_deferred_package_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: str) -> None:
    log, folder = tmp_path / "log", tmp_path / "deferred"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / f"{name}.py").write_text(f"with open({str(log)!r}, 'a') as log:\n    log.write('{name} ')\n{text}")
        monkeypatch.delitem(sys.modules, f"deferred.{name}".removesuffix(".__init__"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    package = defer("deferred", "config")
    importlib.import_module("deferred.config")
    assert package.disable(len)([1, 2]) == 2 and package.trace_rules.clear_lru_cache() is None
    assert not hasattr(package, "__wrapped__")
    assert log.read_text() == "config " and type(package) is Deferred
    if used == "a value":
        assert package.VALUE == 1
    elif used == "a module":
        assert importlib.import_module("deferred.other") is package.other
    else:
        exec("from deferred import other")
    assert log.read_text() == "config __init__ other " and type(package) is ModuleType
    assert importlib.import_module("deferred") is package and importlib.reload(package.other) is package.other


def test_a_compiler_that_is_loaded_while_a_function_is_captured_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import eval_frame

    for deferral in (None, SimpleNamespace(then=[])):
        monkeypatch.setattr(fake_mode, "_deferral_of", lambda _, deferral=deferral: deferral)
        with fake_mode.uncompiled():
            if deferral is not None:
                assert eval_frame._stance.stance == "default"
                deferral.then[0]()
            assert eval_frame._stance.stance == "force_eager"
        assert eval_frame._stance.stance == "default" and not (deferral and deferral.then)


THREADS = """
import threading
import torch
from tpshard.kernels.fake_mode import fake_mode

def enter():
    with fake_mode():
        torch.empty(2)
    print("entered")

for _ in range(3):
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
"""


def test_threads_one_after_another_enter_fake_modes() -> None:
    """Where torch is built for CUDA and there is no GPU, its own mode ends the second or third one's process."""
    assert python(THREADS).stdout.split() == 3 * ["entered"]
