"""`tpshard quantize` takes a module of the user's, and `serve` reads its folder for a recipe that names the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
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
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.models.objectives.tasks import Field, task_of
from tpshard.models.open_model import open_model
from tpshard.programs.server.serve_setting import ServeSetting
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.server.serving import ServingPrograms, build_serving
from tpshard.programs.server.task_orders import orders_in_task
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.weights import Weights
from tpshard.serve.quantizing.quantize_layers import Quantizer
from tpshard.serve.quantizing.task_rows import TaskRows, text_rows
from tpshard.serve.quantizing.write_quantized import write_quantized
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTForImageClassification

VOCAB, WIDTH, HEADS = 288, 32, 2
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


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


def job(spec: ModuleModel, calibration: TaskRows, held_out: TaskRows | None = None, rows: int = 8) -> Quantizer:
    def read(name: str) -> Tensor:
        shape = spec.shapes[name]
        return spec.initial_block(name, (0,) * len(shape), shape, seed=0)

    settings = Settings(group_size=8 if held_out is None else 4)
    return Quantizer(spec, read, calibration, held_out or calibration, settings, "head_local", rows=rows)


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
        assert f"serve or evaluate a recipe with model.module: {OWN}" in capsys.readouterr().err
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


class Vision(ViTForImageClassification):
    inputs = ("pixels",)

    def __init__(self) -> None:
        super().__init__(ViTConfig(image_size=16, patch_size=8, num_labels=8, **_SMALL))

    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(pixels).logits


class Translator(T5ForConditionalGeneration):
    """An encoder and a decoder, which reads the encoder's output. Its dropout is that of training alone."""

    inputs = ("source", "told")

    def __init__(self) -> None:
        super().__init__(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                  use_cache=False, dropout_rate=0.5))  # fmt: skip

    def forward(self, source: Tensor, told: Tensor) -> Tensor:
        return super().forward(input_ids=source, decoder_input_ids=told).logits


class Images:
    """Which of eight pictures one of noise resembles: a target a row."""

    text = False

    def __init__(self, seq_len: int) -> None:
        self.fields = {"pixels": Field((3, 16, 16), ("", "", ""), torch.float32), "targets": Field((), ())}

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (batch["pixels"],)

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return cross_entropy_sum(output, batch["targets"])

    def rows(self, numbers: Sequence[int], seed: int) -> dict[str, Tensor]:
        pixels = torch.randn(len(numbers), 3, 16, 16, generator=torch.Generator().manual_seed(numbers[0] % 1000))
        return {"pixels": pixels, "targets": torch.tensor([number % 8 for number in numbers])}


class Reversed:
    """The tokens of a source from its end on."""

    text = False

    def __init__(self, seq_len: int) -> None:
        self.fields = {name: Field((seq_len,), ("seq",)) for name in ("source", "told", "targets")}

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return batch["source"], batch["told"]

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return cross_entropy_sum(output, batch["targets"])

    def rows(self, numbers: Sequence[int], seed: int) -> dict[str, Tensor]:
        length = self.fields["source"].shape[0]
        source = torch.randint(
            1, 64, (len(numbers), length), generator=torch.Generator().manual_seed(numbers[0] % 1000)
        )
        return {"source": source, "told": source.flip(1).roll(1, 1), "targets": source.flip(1)}


_T5 = ("encoder.block.{i}.layer.0.SelfAttention", "decoder.block.{i}.layer.0.SelfAttention",
       "decoder.block.{i}.layer.1.EncDecAttention", "encoder.block.{i}.layer.1.DenseReluDense",
       "decoder.block.{i}.layer.2.DenseReluDense")  # fmt: skip


@pytest.mark.parametrize(
    ("module", "task", "linears", "absorbed"),
    [
        ("Vision", "Images", 12, {"vit.layers.{i}.mlp.fc2", "vit.layers.{i}.attention.o_proj"}),
        ("Translator", "Reversed", 32, {f"{path}.{'wo' if 'Dense' in path else 'o'}" for path in _T5}),
    ],
)
def test_modules_of_images_and_of_two_texts(
    module: str, task: str, linears: int, absorbed: set[str], tmp_path: Path
) -> None:
    """The folder has the loss that was measured, and the order of each linear behind others is absorbed."""
    spec, task_ = ModuleModel(f"{__name__}:{module}"), task_of(f"{__name__}:{task}", 12)
    calibration, held_out = (TaskRows(task_.rows(range(n, n + 16), 0), task_) for n in (0, 100))
    quantizer = job(spec, calibration, held_out, rows=8)
    with torch.random.fork_rng():
        report = write_quantized(quantizer, tmp_path / "out")
    assert len(report.linears) == linears and report.loss_after != report.loss_before
    folder = ModuleModel(spec.path, {}, tmp_path / "out")
    assert folder.weights is not None
    module_ = globals()[module]().eval()
    values = {name: folder.weights.block(name, (0,) * len(s), s).float() for name, s in folder.shapes.items()}
    with torch.no_grad():
        output = torch.func.functional_call(module_, values, task_.inputs(held_out.batch), tie_weights=True)
    total, count = task_.loss(output, held_out.batch)
    assert report.loss_after == pytest.approx(float(total / count), abs=1e-5)
    assert report.held_out_tokens == int(count)
    between = orders_in_task(spec, tmp_path / "out", task_)
    expected = {f"{name.format(i=i)}.weight" for name in absorbed for i in range(2)}
    assert {name for name, what in between.items() if not what} == expected
    assert all("reads the same values" in between[name] for name in between.keys() - expected)
