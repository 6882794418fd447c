"""`tpshard quantize` takes a module of the user's, and `serve` reads its folder for a recipe that names the module."""

from __future__ import annotations

from pathlib import Path

import pytest
import task_models
import torch
from servers import lockstep, sequences_for
from torch import Tensor, nn
from tpshard.cli.main import run
from tpshard.cli.shared.serve_worker import stored_weights
from tpshard.cli.shared.sources import open_source
from tpshard.diagnostics.diagnostic import Exit
from tpshard.kernels.attention.attention import attention
from tpshard.kernels.quantized.gptq_solver import Settings
from tpshard.models.layered.layered_model import NotQuantizable
from tpshard.models.module_model import ModuleModel
from tpshard.models.objectives.tasks import task_of
from tpshard.models.open_model import open_model
from tpshard.parallelism.words import IN_SEQUENCE
from tpshard.programs.server.serve_setting import ServeSetting
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.server.serving import ServingPrograms, build_serving
from tpshard.programs.server.task_orders import orders_in_task
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.weights import Weights
from tpshard.serve.quantizing.quantize_layers import Quantizer
from tpshard.serve.quantizing.task_rows import TaskRows, text_rows
from tpshard.serve.quantizing.write_quantized import write_quantized

VOCAB, WIDTH, HEADS = 288, 32, 2


class Own(nn.Module):
    """A decoder whose MLP has a bias and squares its hidden values."""

    def __init__(self, vocab: int, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, WIDTH), nn.Linear(WIDTH, vocab, bias=False)
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(layers))

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, documents)
        return self.head(x)  # type: ignore[no-any-return]


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)) for one in (self.q, self.k, self.v))
        x = x + self.o(attention(q, k, v, documents).flatten(-2))
        return x + self.down(torch.relu(self.up(x)).square())  # type: ignore[no-any-return]


class Looped(Own):
    """One block that runs twice."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.block = OwnBlock()
        del self.blocks


OWN = f"{__name__}:Own"
RECIPE = f"""name: own
cluster: {{device: cpu}}
model: {{module: "{OWN}", args: {{vocab: {VOCAB}}}, seq_len: 16, dtype: fp32}}
sharding: {{rules: {{hidden: tp}}}}
serve: {{requests: 8, step_tokens: 8}}
"""


def rows_of_text() -> TaskRows:
    tokens = torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(0))
    return text_rows(tokens, tokens.roll(-1, 1))


def job(spec: ModuleModel, calibration: TaskRows, held_out: TaskRows | None = None, group: int = 8) -> Quantizer:
    def read(name: str) -> Tensor:
        shape = spec.shapes[name]
        return spec.initial_block(name, (0,) * len(shape), shape, seed=0)

    settings = Settings(group_size=group)
    return Quantizer(spec, read, calibration, held_out or calibration, settings, "head_local", rows=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module in 4 bits, act-ordered."""
    out = tmp_path_factory.mktemp("own") / "out"
    report = write_quantized(job(ModuleModel(OWN, {"vocab": VOCAB}), rows_of_text()), out)
    assert len(report.linears) == 12 and report.loss_after != report.loss_before
    return out


def served(folder: Path, *overrides: str) -> tuple[ServingPrograms, Weights]:
    recipe = loads(RECIPE, [f"serve.checkpoint={folder}", *overrides])
    programs = build_serving(ServeSetting.of(recipe, model_to_serve(recipe, "cpu"), "cpu"))
    return programs, stored_weights(open_source(str(folder), modules=True, trusted=recipe))


@pytest.mark.parametrize("ways", [1, 2])
def test_a_server_has_the_logits_of_the_dequantized_module(folder: Path, ways: int) -> None:
    programs, weights = served(folder, f"serve.mesh.tp={ways}", "model.dims={'blocks.*.up.weight': [hidden, width]}")
    dense = Own(VOCAB)
    dense.load_state_dict({name: weights.block(name, (), ()).float() for name in weights.shapes})
    expected = [dense(torch.from_numpy(tokens)[None])[0] for tokens in sequences_for()]
    assert torch.allclose(lockstep(programs, weights), torch.cat(expected), atol=1e-5)
    between = programs.arrangement.between
    absorbed = {name for name, stopped in between.items() if not stopped}
    assert absorbed == {f"blocks.{i}.{leaf}.weight" for i in range(2) for leaf in ("o", "down")}


def test_the_folder_is_no_reason_to_import_the_module(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a recipe that names it is; and a folder whose tensors are of another form is refused."""
    for command in (["evaluate", str(folder)], ["generate", str(folder), "a"], ["convert", str(folder), "out"]):
        assert run(command) == Exit.CHECKPOINT
        assert f"serve.checkpoint={folder}, with a RECIPE that has model.module: {OWN}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="imported for a recipe, never for a folder"):
        open_model(folder, module="another:Own")
    with pytest.raises(ValueError, match=r"blocks\.2\.q\.weight` is missing"):
        ModuleModel(OWN, {"vocab": VOCAB, "layers": 3}, folder).weights  # noqa: B018 (raises)


def test_a_module_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(NotQuantizable, match="Looped has no list of layers"):
        ModuleModel(f"{__name__}:Looped", {"vocab": VOCAB}).layered(torch.float32)


class Twice(Own):
    """All blocks run twice."""

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x, documents)
        return self.head(x)  # type: ignore[no-any-return]


def test_layers_that_run_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run several times in one forward pass"):
        write_quantized(job(ModuleModel(f"{__name__}:Twice", {"vocab": VOCAB}), rows_of_text()), tmp_path / "out")


_T5 = ("encoder.block.{i}.layer.0.SelfAttention", "decoder.block.{i}.layer.0.SelfAttention",
       "decoder.block.{i}.layer.1.EncDecAttention", "encoder.block.{i}.layer.1.DenseReluDense",
       "decoder.block.{i}.layer.2.DenseReluDense")  # fmt: skip


@pytest.mark.parametrize(
    ("module", "task", "group", "linears", "absorbed"),
    [
        ("Vision", "Images", 4, 12, {"vit.layers.{i}.mlp.fc2", "vit.layers.{i}.attention.o_proj"}),
        ("Vision", "Images", 16, 12, {"vit.layers.{i}.mlp.fc2"}),  # of two heads: attention's results have no order
        ("Translator", "Reversed", 4, 32, {f"{path}.{'wo' if 'Dense' in path else 'o'}" for path in _T5}),
    ],
)
def test_modules_of_images_and_of_two_texts(
    module: str, task: str, group: int, linears: int, absorbed: set[str], tmp_path: Path
) -> None:
    """The folder has the loss that was measured, and the order of each linear behind others is absorbed."""
    spec, task_ = ModuleModel(f"task_models:{module}"), task_of(f"task_models:{task}", 12)
    calibration, held_out = (TaskRows(task_.rows(range(n, n + 16), 0), task_) for n in (0, 100))
    quantizer = job(spec, calibration, held_out, group=group)
    with torch.random.fork_rng():
        report = write_quantized(quantizer, tmp_path / "out")
    assert len(report.linears) == linears and report.loss_after != report.loss_before
    folder = ModuleModel(spec.path, {}, tmp_path / "out")
    assert folder.weights is not None
    module_ = getattr(task_models, module)().eval()
    values = {name: folder.weights.block(name, (0,) * len(s), s).float() for name, s in folder.shapes.items()}
    with torch.no_grad():
        output = torch.func.functional_call(module_, values, task_.inputs(held_out.batch), tie_weights=True)
    total, count = task_.loss(output, held_out.batch)
    assert report.loss_after == pytest.approx(float(total / count), abs=1e-5)
    assert report.held_out_tokens == int(count)
    between = orders_in_task(spec, tmp_path / "out", task_)
    expected = {f"{name.format(i=i)}.weight" for name in absorbed for i in range(2)}
    assert {name for name, what in between.items() if not what} == expected
    of_heads = {name for name, what in between.items() if what == IN_SEQUENCE}
    assert of_heads == (set() if group == 4 else {name for name in between if "o_proj" in name})
    assert all("reads the same values" in between[name] for name in between.keys() - expected - of_heads)
