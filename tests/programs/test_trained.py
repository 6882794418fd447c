"""What a module does not train stays as it is: a step is that of torch's own optimizer on the module itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.models.objectives.targets import IGNORE
from tpshard.plan import planner
from tpshard.programs.compare.float64 import BOUND, distance, float64
from tpshard.programs.compare.lockstep import Lockstep
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.recipes.reading.load import loads

torch.set_num_threads(1)
VOCAB, WIDTH, LR = 24, 8, 1e-2


class Layer(nn.Module):
    """A residual MLP: `up` is frozen, `unused` is never read, `detached` is read without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(2))
        self.unused, self.detached = (nn.Parameter(torch.empty(1, WIDTH)) for _ in range(2))
        self.up.requires_grad_(False)
        self.dims = {"up": ("mlp", "embed"), "down": ("embed", "mlp")}

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = 1 + self.detached.tanh()
        return x + F.linear(torch.tanh(F.linear(x, self.up)), self.down) * scale


class Frozen(nn.Module):
    """A model of tokens [batch, seq] whose table, and the `frozen` first layers, are not trained."""

    def __init__(self, layers: int = 4, frozen: int = 0) -> None:
        super().__init__()
        self.table, self.head = (nn.Parameter(torch.empty(VOCAB, WIDTH)) for _ in range(2))
        self.table.requires_grad_(False)
        self.dims = {"table": ("vocab", "embed"), "head": ("vocab", "embed")}
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.layers[:frozen].requires_grad_(False)

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        x = F.embedding(tokens, self.table)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.head)


class Alone(Frozen):
    """A model of which nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


@pytest.fixture(autouse=True)
def own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_from_spec(ModuleSpec("own_frozen", None))
    module.Frozen, module.Alone = Frozen, Alone  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_frozen", module)


def setting_of(mesh: str, *overrides: str, cls: str = "Frozen") -> Setting:
    recipe = (
        f"name: frozen\ncluster: {{device: cpu}}\nmesh: {mesh}\n"
        f"model: {{module: 'own_frozen:{cls}', seq_len: 6, dtype: fp32}}\n"
        "batch: {global_sequences: 8, per_device: 2}\ncompile: eager\n"
    )
    return Setting.of(loads(recipe, overrides))


class Theirs:
    """The module itself, trained by torch's autograd and optimizers on the batches of a lock-step run, in float64."""

    def __init__(self, model: nn.Module, values: Mapping[str, Tensor], optimizer: str = "adamw") -> None:
        self.model = model.double()
        own = dict(model.named_parameters())
        for name, value in values.items():
            own[name].data = value.clone()
        groups = [{"params": [p for p in own.values() if (p.dim() >= 2) is decayed], "weight_decay": 0.1 * decayed}
                  for decayed in (True, False)]  # fmt: skip
        assert optimizer == "adamw"
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=(0.9, 0.95), eps=1e-8)

    def step(self, batches: list[list[Tensor]]) -> tuple[float, dict[str, Tensor]]:
        """(norm before clipping, gradients of the summed loss) of one step."""
        self.optimizer.zero_grad()
        count = 0
        for tokens, targets, documents, positions in batches:
            with float64():
                loss, targets_in = cross_entropy_sum(self.model(tokens, documents, positions), targets)
                loss.backward()
            count += int(targets_in)
        named = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad /= count
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(norm), named


@cache
def built(mesh: str, overrides: tuple[str, ...]) -> TrainingPrograms:
    return training.build(setting_of(mesh, *overrides))


def assert_theirs(programs: TrainingPrograms, model: nn.Module, vocab: int = VOCAB) -> None:
    """Asserts that two steps have the gradients, norms and weights of torch, bit for bit where nothing is trained."""
    ours, recorded = Lockstep(programs, vocab), []
    draw = ours.batches.next

    def batches() -> list[dict[tuple[str, str], Tensor]]:
        recorded.append(draw())
        return recorded[-1]

    ours.batches.next = batches  # type: ignore[method-assign]
    start = ours.weights()
    theirs = Theirs(model, start)
    for _ in range(2):
        result = ours.step(LR)
        norm, gradients = theirs.step([list(fields.values()) for fields in recorded[-1]])
        assert result.gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert distance(result.gradients[name], gradient) <= BOUND, name
        assert result.grad_norm == pytest.approx(norm, rel=BOUND)
    weights, expected = ours.weights(), dict(theirs.model.named_parameters())
    for name, weight in weights.items():
        assert distance(weight, expected[name].detach()) <= BOUND, name
        assert torch.equal(weight, start[name]) is (name not in gradients), name


CASES: list[tuple[str, tuple[str, ...]]] = [
    ("{}", ()), ("{fsdp: 2}", ()), ("{fsdp: 2, tp: 2}", ("fsdp.accumulate={gather: step, reduce: last}",)),
    ("{fsdp: 2, tp: 2}", ("remat=full",)), ("{fsdp: 2}", ("model.args.layers=9",)),
    ("{pp: 2, fsdp: 2}", ("pipeline.form=staged",)), ("{pp: 2}", ("pipeline={schedule: gpipe, form: vectorized}",)),
    ("{pp: 2}", ("pipeline.schedule=zero_bubble", "model.args.frozen=2")),
    ("{pp: 2}", ("pipeline={}", "fsdp.accumulate={gather: step, reduce: last}", "model.args.frozen=3")),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "overrides"), CASES)
def test_a_step_trains_what_torch_trains(mesh: str, overrides: tuple[str, ...]) -> None:
    programs = built(mesh, overrides)
    assert_theirs(programs, Frozen(**programs.setting.recipe.model.args))


@pytest.mark.parametrize("optimizer", ["lion", "muon"])
def test_no_optimizer_moves_what_is_not_trained(optimizer: str) -> None:
    runs = [Lockstep(built(mesh, (f"optimizer.name={optimizer}",)), VOCAB) for mesh in ("{}", "{fsdp: 2, tp: 2}")]
    start = runs[0].weights()
    for run in runs:
        run.step()
    weights, others = (run.weights() for run in runs)
    trained = {"head", *(f"layers.{i}.down" for i in range(4))}
    assert {name for name in start if not torch.equal(start[name], weights[name])} == trained
    assert all(distance(others[name], weight) <= BOUND for name, weight in weights.items())


def test_what_gets_no_gradient_is_named_once_and_what_is_frozen_is_not() -> None:
    for mesh, overrides in CASES:
        text = "\n".join(built(mesh, overrides).micro.warnings)
        assert text.count("no gradient reaches") == 1
        line = next(line for line in text.splitlines() if "no gradient reaches" in line)
        assert "layers.*.unused, layers.*.detached" in line and "up" not in line and "table" not in line


@pytest.mark.parametrize(("mesh", "overrides"), CASES)
def test_the_plan_counts_gradients_and_moments_of_what_is_trained(mesh: str, overrides: tuple[str, ...]) -> None:
    programs = built(mesh, overrides)
    if programs.pipeline is not None:
        return
    held = planner.planned_training(programs).report.pricing.static_bytes
    local: dict[str, int] = {}
    for port in programs.stored:
        local[port.name] = port.local_bytes
    trained = {name: local[name] for name in programs.trained}
    assert set(trained) < set(local)
    assert held["optimizer"] == 2 * sum(trained.values())
    if programs.gather is None:
        assert (held["parameters"], held["gradients"]) == (sum(local.values()), sum(trained.values()))


def test_a_model_without_a_trained_parameter_is_refused() -> None:
    with pytest.raises(Mistakes) as error:
        training.build(setting_of("{}", cls="Alone"))
    assert error.value.exit == Exit.FIT and "no parameter of Alone can be trained" in str(error.value)


def test_layers_that_train_other_parameters_are_not_stacked() -> None:
    with pytest.raises(Mistakes) as error:
        training.build(setting_of("{pp: 2}", "pipeline={schedule: gpipe, form: vectorized}", "model.args.frozen=1"))
    assert "`down.requires_grad` is False in layer 0 and True in layer 1" in str(error.value)


@pytest.mark.parametrize(("mesh", "overrides"), [*CASES[:3], CASES[5], CASES[7]])
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_a_step_without_a_target_changes_nothing(mesh: str, overrides: tuple[str, ...], optimizer: str) -> None:
    """Nor does it move moments, on any rank, with micro-batches and stages."""
    run = Lockstep(built(mesh, (*overrides, f"optimizer.name={optimizer}")), VOCAB)
    run.step()
    rows = run.batches._rows()
    rows["targets"].fill_(IGNORE)
    run.batches._rows = lambda: rows  # type: ignore[method-assign]
    before = [[tensor.clone() for tensor in part] for part in run.values.values()]
    assert run.step().loss == 0.0
    assert all(
        torch.equal(*pair)
        for parts in zip(before, run.values.values(), strict=True)
        for pair in zip(*parts, strict=True)
    )
