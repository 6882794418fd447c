"""A small training recipe with its batches, and the results of three steps by autograd on one device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from tpshard.models.family_model import FamilyModel
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.models.optimizers.adamw import AdamW, adamw_update, treatments
from tpshard.parallelism.runtime.context import Context
from tpshard.programs.compare.float64 import BOUND, distance, float64
from tpshard.programs.parts.memo import Memo
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads
from tpshard.train.checkpoints.shards import Shard
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.run import training_worker
from tpshard.train.run.outcome import Outcome
from tpshard.train.run.run_plan import PlanOfRun
from tpshard.train.run.training_engine import TrainingEngine

RECIPE = """
name: small
cluster: {device: cpu}
model: {preset: tiny, layers: 2, width: 24, heads: 4, kv_heads: 2, head_dim: 8, mlp: 36, vocab: 40, seq_len: 12}
batch: {global_sequences: 12, per_device: 2}
compile: eager
"""
SEED = 3
BUILD, MEMO = training.build, Memo()


def setting_of(mesh: dict[str, int], *overrides: str) -> Setting:
    sizes = ", ".join(f"{axis}: {size}" for axis, size in mesh.items())
    return Setting.of(loads(RECIPE + f"mesh: {{{sizes}}}\n", overrides))


def global_batch(step: int) -> StepBatch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 40, (12, 13), generator=generator)
    documents = (torch.arange(12) >= 7).long().expand(12, 12).contiguous()
    targets = tokens[:, 1:].clone()
    targets[:, 6] = -100  # The last token of a document predicts nothing.
    positions = torch.cat([torch.arange(7), torch.arange(5)]).expand(12, 12).contiguous()
    tensors = {"targets": targets, "documents": documents, "positions": positions}
    return StepBatch({"tokens": tokens[:, :-1].contiguous(), **tensors}, ("",) * 12)


def shared_builds() -> AbstractContextManager[Any]:
    """A context in which recipes that a worker runs one after another share what their programs can. Afterwards the
    worker builds as before: a job in float64 must not get graphs of another."""
    return mock.patch.object(training, "build", partial(BUILD, memo=MEMO))


def train_recipe(context: Context, recipe: Recipe) -> Outcome:
    """Runs a recipe as `tpshard train` does, among the workers of the pool, whose output stays where it is."""
    with mock.patch.object(training_worker, "keep_output", lambda *_: None), shared_builds():
        return training_worker.train(Setting.of(recipe, context.world), context, PlanOfRun())


def spec_of(setting: Setting) -> FamilyModel:
    return FamilyModel.of_preset("tiny", setting.recipe.model.overrides())


def whole(engine: TrainingEngine, shards: dict[str, Shard]) -> dict[str, torch.Tensor]:
    """The global tensors of every rank's shards."""
    out: dict[str, torch.Tensor] = {}
    parts = {n: (s.tensor.double().tolist(), list(s.tensor.shape), s.shape, s.starts) for n, s in shards.items()}
    for part in engine.context.gather(parts):
        for name, (values, sizes, shape, starts) in part.items():
            target = out.setdefault(name, torch.full(shape, float("nan")))
            block = torch.tensor(values, dtype=torch.float64).reshape(sizes)
            target[tuple(slice(a, a + n) for a, n in zip(starts, sizes))] = block.to(target.dtype)
    return out


def train(context: Context, programs: TrainingPrograms, count: int = 3) -> dict[str, Any]:
    """Trains a few steps; returns the record, the first step's gradients, and the whole final state."""
    setting = programs.setting
    engine = TrainingEngine(programs, context, spec_of(setting).initial_block)
    engine.initialize(SEED)
    run, sums = engine._run, {}

    def watch(role: str, values: Any) -> Any:
        if role == "update":
            sums.update({name: values["gradient", f"{name}.grad_sum"].clone() for name in engine.mine.trained})
        return run(role, values)

    engine._run = watch
    plan = setting.batch
    losses, norms, grads = [], [], {}
    for step in range(count):
        rows = plan.rows(engine.data_rank)
        mine = global_batch(step).rows(rows.start, rows.stop)
        for i in range(plan.micro_batches):
            engine.accumulate(mine.rows(i * plan.per_device, (i + 1) * plan.per_device), seed=step)
        result = engine.update(0.01, step + 1)
        if step == 0:
            pairs = [(port, sums[port.name]) for port in engine.ports]
            grads = whole(engine, dict(part for port, total in pairs for part in engine.named_shards("", port, total)))
        losses.append(result.loss)
        norms.append(result.grad_norm)
        assert (result.finite, result.targets) == (True, 12 * 11), result
    loss, targets = engine.evaluate(global_batch(9).rows(plan.per_device * engine.data_rank,
                                                         plan.per_device * (engine.data_rank + 1)))  # fmt: skip
    return {"losses": losses, "norms": norms, "grads": grads, "state": whole(engine, engine.tensors()),
            "eval": (loss, targets), "expected": set(engine.stored_shapes())}  # fmt: skip


@cache
def reference(count: int = 3, *overrides: str) -> dict[str, Any]:
    """The same results by torch's autograd on one device."""
    with float64():
        return _reference(count, overrides)


def _reference(count: int, overrides: Sequence[str]) -> dict[str, Any]:
    setting = setting_of({}, *overrides)
    model = spec_of(setting).build(device="cpu", seed=SEED)
    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    treated = list(treatments({n: p.shape for n, p in params.items()}, {}).values())
    moments = [[torch.zeros_like(p) for p in params.values()] for _ in range(2)]
    losses, norms, first = [], [], {}
    for step in range(count):
        batch = global_batch(step)
        leaves = {n: p.requires_grad_() for n, p in params.items()}
        logits = torch.func.functional_call(model, leaves, (batch["tokens"], batch["documents"], batch["positions"]))
        loss, tokens = cross_entropy_sum(logits, batch["targets"])
        grads = torch.autograd.grad(loss, list(leaves.values()))
        first = first or dict(zip(params, grads))
        updated = adamw_update(
            [p.detach() for p in params.values()], grads, *moments, loss.detach(), tokens, torch.tensor(0.01),
            torch.tensor(step + 1.0), treated=treated, config=AdamW(),
        )  # fmt: skip
        params, moments = dict(zip(params, updated.params)), [updated.exp_avg, updated.exp_avg_sq]
        losses.append(float(loss.detach() / tokens))
        norms.append(float(updated.grad_norm))
    state = dict(params)
    for kind, tensors in zip(("exp_avg", "exp_avg_sq"), moments):
        state |= {f"optimizer/{kind}/{n}": t for n, t in zip(params, tensors)}
    return {"losses": losses, "norms": norms, "grads": first, "state": state}


def assert_trained(result: dict[str, Any], expected: dict[str, Any], bound: float = BOUND) -> None:
    """Asserts that losses, norms, gradients and state agree, relatively and in float64."""
    assert result["losses"] == pytest.approx(expected["losses"], rel=bound)
    assert result["norms"] == pytest.approx(expected["norms"], rel=bound)
    for what in ("grads", "state"):
        assert result[what].keys() == expected[what].keys()
        for name, tensor in expected[what].items():
            assert distance(result[what][name], tensor) <= bound, name
