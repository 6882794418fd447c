"""The host of a GPU waits once in a training step, for its results; shown on fake CUDA tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tpshard.kernels.attention import flash
from tpshard.parallelism.runtime.context import alone
from tpshard.programs.step import training
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.train.run.training_engine import TrainingEngine
from training_cases import global_batch, setting_of, spec_of

aten = torch.ops.aten
WAITS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default)
"""Ops whose result needs values of a device's tensor on the host."""


class HostWait(AssertionError):
    """An operation for which a host waits for its device."""


class Watch(TorchDispatchMode):
    """A mode, inside a `FakeTensorMode`, that counts copies to the host, and raises HostWait at other waits."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[int, ...]] = []
        self.pinned: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        of_device = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        target = torch.device(kwargs.get("device") or (of_device[0].device if of_device else "cpu"))
        if of_device and func in WAITS:
            raise HostWait(f"{func} reads {[tuple(tensor.shape) for tensor in of_device]}")
        if func is aten._pin_memory.default:
            self.pinned.append(args[0])
            return args[0]
        if of_device and target.type == "cpu":
            self.copies.append(tuple(of_device[0].shape))
            with unset_fake_temporarily():
                return torch.zeros(of_device[0].shape, dtype=kwargs.get("dtype") or of_device[0].dtype)
        if tensors and not of_device and target.type == "cuda":
            if not kwargs.get("non_blocking") or not any(one is tensors[0] for one in self.pinned):
                raise HostWait(f"{func} copies pageable memory")
        elif not any(isinstance(tensor, FakeTensor) for tensor in tensors) and target.type == "cpu":
            with unset_fake_temporarily():  # the host's own work
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def engine_of(programs: TrainingPrograms) -> TrainingEngine:
    return TrainingEngine(programs, alone("cuda:0"), None)  # type: ignore[arg-type]


@cache
def programs_of(*overrides: str) -> TrainingPrograms:
    return training.build(setting_of({}, "batch.per_device=6", *overrides))


def step(engine: TrainingEngine) -> None:
    batch = global_batch(0)
    for i in range(2):
        engine.accumulate(batch.rows(6 * i, 6 * i + 6), seed=1)
    engine.update(0.1, 1)


@pytest.mark.parametrize(
    "overrides", [(), ("optimizer.name=muon", "model.preset=tiny-moe", "model.experts=4", "loss.chunks=2")]
)
def test_a_step_waits_once(overrides: tuple[str, ...]) -> None:
    programs = programs_of(*overrides)
    with FakeTensorMode(allow_non_fake_inputs=True):
        engine = engine_of(programs)
        with Watch() as watch:
            step(engine)
            step(engine)
    assert len(watch.copies) == 2


def test_another_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = programs_of()
    with FakeTensorMode(allow_non_fake_inputs=True):
        engine = engine_of(programs)
        monkeypatch.setattr(engine, "_scalar", lambda value: torch.tensor(value, device="cpu").to("cuda:0"))
        with Watch(), pytest.raises(HostWait, match="pageable"):
            step(engine)


def test_each_block_that_is_read_is_progress() -> None:
    """A large model on a slow disk takes longer than a worker may be without progress."""
    programs, context = programs_of(), alone("cpu")
    engine = TrainingEngine(programs, context, spec_of(programs.setting).initial_block)
    engine.initialize(0)
    begun = context.watchdog.progress
    assert begun >= len(programs.stored)
    engine.load(lambda name, starts, sizes: torch.zeros(tuple(sizes)))
    assert context.watchdog.progress - begun >= 3 * len(programs.stored), "parameters and two moments"


def test_the_borders_of_documents_are_found_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, compute = [], flash._starts
    monkeypatch.setattr(flash, "_starts", lambda documents: counted.append(1) or compute(documents))
    documents = torch.tensor([[0, 0, 1], [2, 2, 2]])
    for _ in range(3):
        assert flash.starts_of(documents).tolist() == [0, 2, 3, 6]  # type: ignore[union-attr]
    assert len(counted) == 1
    documents[1, 2] = 3
    assert flash.starts_of(documents).tolist() == [0, 2, 3, 5, 6]  # type: ignore[union-attr]
    documents[1, 2] = 1
    assert flash.starts_of(documents) is None, "ids that decrease are for another kernel"
    assert len(counted) == 2
