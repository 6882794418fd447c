"""Dims of a user's module are named by its modules, by the recipe, or not at all."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.assemble import import_object
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight
        self.dims = {"head.weight": ("vocab", "embed"), "head.bias": ("vocab",)}

    def forward(self, tokens, documents=None, positions=None):
        x = self.table(tokens)
        return self.head(x + self.down(torch.relu(self.up(x))))
"""


@pytest.fixture
def setting_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Setting]:
    """A function from `model.dims` to the setting of `Net` on tp 2."""
    (tmp_path / "own_net.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = "model: {{module: 'own_net:Net', seq_len: 6, dtype: fp32{dims}}}\nbatch: {{global_sequences: 4}}\n"
    return lambda dims: Setting.of(loads(recipe.format(dims=dims) + "mesh: {tp: 2}\ncompile: eager\n"))


def test_no_file_beside_a_module_is_imported_as_pythons_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as `_winapi`, which Python's own modules ask for and have on other systems alone."""
    (tmp_path / "_winapi.py").write_text("raise SystemExit('a file of the working directory was imported')")
    (tmp_path / "beside.py").write_text("VALUE = 3")
    (tmp_path / "own_place.py").write_text("import beside\nclass Net: value = beside.VALUE\n")
    monkeypatch.chdir(tmp_path)
    assert import_object("module", "own_place:Net").value == 3
    with pytest.raises(ModuleNotFoundError, match="_winapi"):
        importlib.import_module("_winapi")


def test_parameters_without_names_are_inferred(setting_of: Callable[[str], Setting]) -> None:
    """A tied parameter has the names of any of its paths; a pattern of the recipe names one more."""
    assert setting_of("").dims == {"table.weight": ("vocab", "embed")}
    setting = setting_of(", dims: {up.weight: [mlp, null]}")
    assert setting.dims == {"table.weight": ("vocab", "embed"), "up.weight": ("mlp", "")}
    programs = training.build(setting)
    shardings = {name: tuple(s) for name, s in zip(programs.names, programs.micro.in_shardings)}
    assert "a dim by <text>:1:" in programs.micro.explain("up.weight")
    assert shardings["down.weight"] == (None, "tp") and shardings["up.bias"] == ("tp",), "inferred"
    assert any("nothing names the dims of up.bias, down.weight, down.bias of Net" in w for w in programs.micro.warnings)

    model = import_object("module", "own_net:Net")()
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    tokens = torch.randint(0, 16, (4, 6), generator=generator)
    batch = setting.task.fields | {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    batch |= dict.fromkeys(("documents", "positions"), torch.zeros_like(tokens))
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    logits = torch.func.functional_call(model, leaves, (tokens,), tie_weights=True)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    actual, _, *grads = programs.micro.simulate(
        *values.values(), *map(torch.zeros_like, values.values()), *batch.values()
    )
    assert float(actual) == pytest.approx(float(loss.detach()), rel=1e-5)
    for expected, grad in zip(torch.autograd.grad(loss, list(leaves.values())), grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ("{middle.weight: [mlp, null]}", "`middle.weight` matches no parameter of Net"),
        ("{down.weight: [mlp]}", "names 1 dim, and `down.weight` has 2: [8, 12]"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(dims: str, message: str, setting_of: Callable[[str], Setting]) -> None:
    with pytest.raises(Mistakes) as error:
        _ = setting_of(f", dims: {dims}").dims
    assert error.value.exit == Exit.RECIPE and message in str(error.value)
