"""`tpshard quantize` takes a module of the user's, and `serve` reads its folder for a recipe that names the module."""

from __future__ import annotations

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
from tpshard.models.open_model import open_model
from tpshard.programs.server.serve_setting import ServeSetting
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.server.serving import ServingPrograms, build_serving
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.weights import Weights
from tpshard.serve.quantizing.quantize_layers import Quantizer, Sequences
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


class OfPlaces(Own):
    inputs = ("places",)


OWN = f"{__name__}:Own"
RECIPE = f"""name: own
cluster: {{device: cpu}}
model: {{module: "{OWN}", args: {{vocab: {VOCAB}}}, seq_len: 16, dtype: fp32}}
sharding: {{rules: {{hidden: tp}}}}
serve: {{requests: 8, step_tokens: 8}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module in 4 bits, act-ordered."""
    spec, out = ModuleModel(OWN, {"vocab": VOCAB}), tmp_path_factory.mktemp("own") / "out"
    tokens = torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(0))
    text = Sequences(tokens, tokens.roll(-1, 1))

    def read(name: str) -> Tensor:
        shape = spec.shapes[name]
        return spec.initial_block(name, (0,) * len(shape), shape, seed=0)

    report = write_quantized(Quantizer(spec, read, text, text, Settings(group_size=8), "head_local"), out)
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
        assert f"serve a recipe with model.module: {OWN}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="imported for a recipe, never for a folder"):
        open_model(folder, module="another:Own")
    with pytest.raises(ValueError, match=r"blocks\.2\.q\.weight` is missing"):
        ModuleModel(OWN, {"vocab": VOCAB, "layers": 3}, folder).weights  # noqa: B018 (raises)


def test_what_is_no_list_of_layers_of_a_model_of_tokens_is_named() -> None:
    for cls, words in (("Looped", "no list of layers"), ("OfPlaces", "it takes places: only a model of tokens")):
        with pytest.raises(NotQuantizable, match=words):
            ModuleModel(f"{__name__}:{cls}", {"vocab": VOCAB}).layered(torch.float32)
