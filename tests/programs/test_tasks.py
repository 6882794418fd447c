"""A step of each task's model on a mesh equals autograd's on one device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.folders.folder_tokenizer import mask_of
from tpshard.models.objectives.targets import IGNORE
from tpshard.models.objectives.tasks import MaskedLanguageModel, held_out, targets_of_rows, task_of
from tpshard.models.transformers.class_names import task_of_class
from tpshard.programs.parts import step_programs
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import load, loads
from tpshard.train.data.generated_rows import GeneratedRows, held_out_rows


def text_rows(rows: int, length: int, vocab: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(length) >= 5).long().expand(rows, length)
    positions = torch.cat([torch.arange(5), torch.arange(length - 5)]).expand(rows, length)
    return {"tokens": tokens, "targets": tokens.roll(-1, 1), "documents": documents, "positions": positions}


@pytest.mark.parametrize(
    ("name", "overrides", "moves"),
    [
        ("conformer", ["model.args.layers=1", "model.seq_len=16"], {"all_reduce"}),
        ("unet", ["model.args.levels=1", "model.seq_len=8"], {"permute"}),
        ("encoder", ["model.args.layers=1", "model.seq_len=16", "model.args.width=32"], {"all_reduce"}),
        ("dense-2d", ["model.layers=1", "model.seq_len=16", "model.width=32"], {"all_gather", "reduce_scatter"}),
    ],
)
def test_a_step_is_that_of_one_device(name: str, overrides: list[str], moves: set[str]) -> None:
    """Covers batch norm over a sharded batch, group norm over a sharded depth, bidirectional attention, 2-D weights."""
    setting = Setting.of(load(name, [*overrides, "batch.global_sequences=4", "batch.per_device=2"]))
    program = step_programs.micro_program(setting)
    assert moves <= {c.kind for c in program.collectives}
    task = setting.task
    module = setting.spec.build(device="cpu", seed=2)
    leaves = {path: p.detach().requires_grad_() for path, p in module.named_parameters()}
    length = setting.seq_len
    batch = text_rows(4, length, 2048) if task.text else task.rows(range(4), 3)
    output = torch.func.functional_call(module, leaves, task.inputs(batch))
    loss, count = task.loss(output, batch)
    expected = float(loss.detach())
    grads = torch.autograd.grad(loss, list(leaves.values()))
    inputs = [leaf.detach() for leaf in leaves.values()]
    with torch.no_grad():
        loss, counted, *summed = program.simulate(*inputs, *map(torch.zeros_like, inputs), *batch.values())
    assert int(counted) == int(count) > 0
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    scale = max(float(grad.abs().max()) for grad in grads)
    for path, grad, actual in zip(leaves, grads, summed):
        assert (actual - grad).abs().max() <= 1e-4 * max(float(grad.abs().max()), scale / 1000), path


@pytest.mark.parametrize("name", ["frames", "volumes"])
def test_rows_follow_from_their_numbers_alone(name: str) -> None:
    task = task_of(name, 8)
    several = task.rows([3, 5, held_out(0)], seed=1)
    for i, number in enumerate((3, 5, held_out(0))):
        alone = task.rows([number], seed=1)
        assert all(torch.equal(alone[key][0], several[key][i]) for key in task.fields)
    other = task.rows([3], seed=2)
    for key, field in task.fields.items():
        assert several[key].shape == (3, *field.shape) and several[key].dtype == field.dtype
        assert not torch.equal(several[key][0], several[key][1]) and not torch.equal(several[key][2], several[key][0])
        assert not torch.equal(other[key][0], several[key][0])


def test_rows_go_on_where_a_run_stood_on_another_mesh() -> None:
    recipe = loads("model: {module: 'a:B', seq_len: 8}\ntask: frames\nbatch: {global_sequences: 4}\n")
    task = task_of("frames", 8)
    whole = GeneratedRows(task, recipe, range(4))
    first, second = whole.next(), whole.next()
    assert not torch.equal(first["frames"], second["frames"])
    later = GeneratedRows(task, recipe, range(2, 4))
    later.load_state_dict({**whole.state_dict(), "step": 1})
    assert torch.equal(later.next()["frames"], second.rows(2, 4)["frames"])
    with pytest.raises(Mistakes) as error:
        later.load_state_dict({**whole.state_dict(), "tokenizer": "volumes"})
    assert error.value.exit == Exit.DATA and "'volumes' then, 'frames' now" in str(error.value)
    parts = list(held_out_rows(task, recipe, range(2, 5), 4, 2))
    assert [len(part.origin) for part in parts] == [2, 2]
    assert (parts[1]["targets"][1] == IGNORE).all() and not (parts[1]["targets"][0] == IGNORE).any()


def test_about_15_of_100_tokens_are_masked_and_no_other_counts() -> None:
    batch = text_rows(64, 64, 2048)
    batch["targets"] = batch["targets"].clone()
    batch["targets"][:, 7] = IGNORE
    task = MaskedLanguageModel(64)
    chosen = task.masked_positions(batch)
    assert 0.13 < float(chosen.float().mean()) < 0.17 and not chosen[:, 7].any()
    assert torch.equal(task.inputs(batch)[0] != batch["tokens"], chosen & (batch["tokens"] != 0))
    perfect = torch.nn.functional.one_hot(batch["tokens"], 2048).float() * 100
    loss, count = task.loss(perfect, batch)
    assert int(count) == int(chosen.sum()) and float(loss) == pytest.approx(0.0, abs=1e-3)


OWN = '''
import torch
from tpshard.models.objectives.tasks import Field

class Sign:
    """Whether a number is positive."""
    text = False
    def __init__(self, seq_len):
        self.fields = {"x": Field((seq_len,), ("seq",), torch.float32), "targets": Field((seq_len,), ("seq",))}
    def inputs(self, batch):
        return (batch["x"],)
    def loss(self, output, batch):
        wanted = batch["targets"].float()
        return torch.nn.functional.softplus(-output * (2 * wanted - 1)).sum(), torch.ones_like(wanted).sum().long()
    def rows(self, numbers, seed):
        x = torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(n)) for n in numbers])
        return {"x": x, "targets": (x > 0).long()}

class Net(torch.nn.Module):
    inputs = ("x",)
    def __init__(self):
        super().__init__()
        self.weight, self.dims = torch.nn.Parameter(torch.empty(8)), {"weight": ("seq",)}
    def forward(self, x):
        return x * self.weight

class NoTask:
    def __init__(self, seq_len): ...
'''


def test_a_task_and_a_module_of_ones_own_need_no_change_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_sign.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    text = "model: {module: 'own_sign:Net', seq_len: 8}\ntask: 'own_sign:TASK'\nmesh: {dp: 2}\n"
    text += "batch: {global_sequences: 4}\n"
    setting = Setting.of(loads(text.replace("TASK", "Sign")))
    program = step_programs.micro_program(setting)
    batch, weight = setting.task.rows(range(4), 0), torch.full((8,), 0.5)
    loss, count, grad = program.simulate(weight, torch.zeros(8), *batch.values())
    expected, _ = setting.task.loss(batch["x"] * weight, batch)
    assert int(count) == 32 and float(loss) == pytest.approx(float(expected), rel=1e-5) and bool((grad < 0).all())
    for wrong, output in (("NoTask", "has no fields, text, inputs, loss, rows"), ("Gone", "own_sign has no Gone")):
        with pytest.raises(Mistakes) as error:
            _ = Setting.of(loads(text.replace("TASK", wrong))).task
        assert error.value.exit == Exit.RECIPE and output in str(error.value)


def test_only_language_models_are_served() -> None:
    from tpshard.programs.server.serve_setting import ServeSetting
    from tpshard.programs.server.served import model_to_serve

    recipe = load("conformer")
    with pytest.raises(Mistakes) as error:
        ServeSetting.of(recipe, model_to_serve(recipe, "cpu"), "cpu")
    assert error.value.exit == Exit.FIT and "with `task: frames` cannot be served" in str(error.value)


def test_masked_tokens_are_the_tokenizers_own(tmp_path: Path) -> None:
    """Which a folder names; without one, and without a folder, it is token 0."""
    vocab = {"[UNK]": 0, "[MASK]": 1, "a": 2}
    tokens = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokens.add_special_tokens(["[UNK]", "[MASK]"])
    tokens.save(str(tmp_path / "tokenizer.json"))
    batch = text_rows(4, 64, 8)
    for named, mask in (({}, 0), ({"mask_token": "[MASK]"}, 1)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
        task = task_of("mlm", 64, mask=mask_of(tmp_path))
        assert isinstance(task, MaskedLanguageModel)
        masked = task.masked_positions(batch)
        assert masked.any() and set(task.inputs(batch)[0][masked].tolist()) == {mask}
    assert task_of_class({"architectures": ["BertForMaskedLM"]}) == "mlm"
    assert task_of_class({"architectures": ["LlamaForCausalLM"]}) == task_of_class({}) == "lm"


def test_a_row_may_have_one_target() -> None:
    targets = torch.tensor([3, IGNORE, 0])
    assert targets_of_rows(task_of("frames", 8), {"targets": targets}).tolist() == [1, 0, 1]
