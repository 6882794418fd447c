"""Programs on real processes against one plain model: losses, gradients, updates; and bit for bit the simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from float64 import BOUND, distance, float64
from planted_faults import FAULTS, plant
from tpshard.models import Blueprint
from tpshard.models.adamw import AdamW, adamw_update, decays
from tpshard.models.loss import cross_entropy_sum
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.programs import training
from tpshard.programs.setting import Setting
from tpshard.recipes.load import loads
from tpshard.train.shards import Shard
from tpshard.train.spmd import SpmdEngine
from tpshard.train.stream import Batch

RECIPE = """
name: small
cluster: {device: cpu}
model: {preset: tiny, layers: 2, width: 24, heads: 4, kv_heads: 2, head_dim: 8, mlp: 36, vocab: 40, seq_len: 12}
batch: {global_sequences: 12, per_device: 2}
compile: eager
"""
SEED = 3


def setting_of(mesh: dict[str, int]) -> Setting:
    sizes = ", ".join(f"{axis}: {size}" for axis, size in mesh.items())
    return Setting.of(loads(RECIPE + f"mesh: {{{sizes}}}\n"))


def global_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 40, (12, 13), generator=generator)
    documents = (torch.arange(12) >= 7).long().expand(12, 12).contiguous()
    targets = tokens[:, 1:].clone()
    targets[:, 6] = -100  # The last token of a document predicts nothing.
    positions = torch.cat([torch.arange(7), torch.arange(5)]).expand(12, 12).contiguous()
    return Batch(tokens[:, :-1].contiguous(), targets, documents, positions, ("",) * 12, 0)


def blueprint(setting: Setting) -> Blueprint:
    return Blueprint.of(preset="tiny", overrides=setting.recipe.model.overrides())


def whole(engine: SpmdEngine, shards: dict[str, Shard]) -> dict[str, torch.Tensor]:
    """The global tensors of every rank's shards."""
    out: dict[str, torch.Tensor] = {}
    for part in engine.context.gather({n: (s.tensor, s.shape, s.starts) for n, s in shards.items()}):
        for name, (tensor, shape, starts) in part.items():
            target = out.setdefault(name, torch.full(shape, float("nan")))
            target[tuple(slice(a, a + n) for a, n in zip(starts, tensor.shape))] = tensor
    return out


def steps(context: Context, fault: str | None = None, count: int = 3) -> dict[str, Any]:
    """Trains a few steps in float64; the record, and the whole state at the end."""
    with float64():
        return _steps(context, fault, count)


def _steps(context: Context, fault: str | None, count: int) -> dict[str, Any]:
    setting = setting_of(dict(context.mesh.axes))
    programs = training.build(setting)
    if fault is not None:
        programs = replace(programs, micro=plant(programs.micro, FAULTS[fault]))
    engine = SpmdEngine(programs, context, blueprint(setting).initial_block)
    engine.initialize(SEED)
    plan = setting.batch
    losses, norms, grads = [], [], {}
    for step in range(count):
        rows = plan.rows(engine.data_rank)
        mine = global_batch(step).rows(rows.start, rows.stop)
        for i in range(plan.micro_batches):
            engine.accumulate(mine.rows(i * plan.per_device, (i + 1) * plan.per_device))
        if step == 0:
            pairs = zip(engine.tensors().items(), engine.sums)
            grads = whole(engine, {n: Shard(g[tuple(map(slice, s.tensor.shape))], s.shape, s.starts)
                                   for (n, s), g in pairs})  # fmt: skip
        result = engine.update(0.01, step + 1)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        assert (result.finite, result.targets) == (True, 12 * 11), result
    loss, targets = engine.evaluate(global_batch(9).rows(plan.per_device * engine.data_rank,
                                                         plan.per_device * (engine.data_rank + 1)))  # fmt: skip
    return {"losses": losses, "norms": norms, "grads": grads, "state": whole(engine, engine.tensors()),
            "eval": (loss, targets)}  # fmt: skip


@cache
def reference(count: int = 3) -> dict[str, Any]:
    """The same on one device, with torch's autograd and nothing else."""
    with float64():
        return _reference(count)


def _reference(count: int) -> dict[str, Any]:
    setting = setting_of({})
    model = blueprint(setting).build(device="cpu", seed=SEED)
    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    decay = list(decays({n: p.shape for n, p in params.items()}).values())
    moments = [[torch.zeros_like(p) for p in params.values()] for _ in range(2)]
    losses, norms, first = [], [], {}
    for step in range(count):
        batch = global_batch(step)
        leaves = {n: p.requires_grad_() for n, p in params.items()}
        logits = torch.func.functional_call(model, leaves, (batch.tokens, batch.documents, batch.positions))
        loss, tokens = cross_entropy_sum(logits, batch.targets)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        first = first or dict(zip(params, grads))
        made = adamw_update(
            [p.detach() for p in params.values()], grads, *moments, loss.detach(), tokens, torch.tensor(0.01),
            torch.tensor(step + 1.0), decay=decay, config=AdamW(),
        )  # fmt: skip
        params, moments = dict(zip(params, made.params)), [made.exp_avg, made.exp_avg_sq]
        losses.append(float(loss.detach() / tokens))
        norms.append(float(made.grad_norm))
    state = dict(params)
    for kind, tensors in zip(("exp_avg", "exp_avg_sq"), moments):
        state |= {f"optimizer/{kind}/{n}": t for n, t in zip(params, tensors)}
    return {"losses": losses, "norms": norms, "grads": first, "state": state}


def assert_trained(made: dict[str, Any], expected: dict[str, Any]) -> None:
    assert made["losses"] == pytest.approx(expected["losses"], rel=BOUND)
    assert made["norms"] == pytest.approx(expected["norms"], rel=BOUND)
    for what in ("grads", "state"):
        assert made[what].keys() == expected[what].keys()
        for name, tensor in expected[what].items():
            assert distance(made[what][name], tensor) <= BOUND, name


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tp": 2}, {"fsdp": 3}])
def test_three_steps_equal_the_plain_model(pool: Any, mesh: dict[str, int]) -> None:
    world = math.prod(mesh.values())
    for made in pool.run(steps, world=world, mesh={"dp": 1, "fsdp": 1, "tp": 1} | mesh):
        assert_trained(made, reference())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(pool: Any, fault: str) -> None:
    for made in pool.run(steps, fault, world=2, mesh={"dp": 1, "fsdp": 2, "tp": 1}):
        with pytest.raises(AssertionError):
            assert_trained(made, reference())


def against_simulation(context: Context) -> list[bool]:
    """The executor's results on this rank, and those of a lock-step simulation of all ranks, bit for bit."""
    from tpshard.parallelism.simulate import local_arguments, run_lockstep

    setting = setting_of(dict(context.mesh.axes))
    program = training.micro_program(setting)
    generator = torch.Generator().manual_seed(0)
    batch = global_batch(0)
    arguments = []
    for port in program.inputs:
        if port.kind == "batch":
            arguments.append(getattr(batch, port.name)[: port.shape[0]])
        else:
            arguments.append(torch.randn(port.shape, generator=generator) * 0.1)
    feeds = [local_arguments(program, rank, arguments) for rank in range(context.world)]
    expected = run_lockstep(program, [[t.clone() for t in feed] for feed in feeds])[context.rank]
    made = Executor(program, context)(*feeds[context.rank])
    return [torch.equal(a, b) for a, b in zip(made, expected, strict=True)]


def test_processes_and_simulation_agree_bit_for_bit(pool: Any) -> None:
    for equal in pool.run(against_simulation, world=4, mesh={"dp": 1, "fsdp": 2, "tp": 2}):
        assert len(equal) > 10 and all(equal)
