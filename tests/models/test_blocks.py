"""Laws of the models' arithmetic: causality, dim names, initial values, the loss."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from tpshard.models import build, build_module
from tpshard.models.assemble import import_object
from tpshard.models.dims import name, param_dims
from tpshard.models.families.config import ModelConfig
from tpshard.models.families.family import DIMS
from tpshard.models.families.layers import Linear
from tpshard.models.families.presets import PRESETS, preset
from tpshard.models.initialization import init_plan, initial_block
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.programs.compare.float64 import BOUND, distance, float64

SMALL = {
    "llama": preset(
        "tiny", {"layers": 2, "width": 48, "heads": 6, "kv_heads": 2, "head_dim": 10, "mlp": 40, "vocab": 97}
    ),
    "tied": preset(
        "tiny", {"layers": 1, "vocab": 97, "tie_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "multi-query": preset("tiny", {"layers": 1, "kv_heads": 1, "vocab": 97}),
    "granite": preset("granite-tiny", {"layers": 2, "width": 48, "heads": 3, "vocab": 97, "tie_embeddings": False}),
}


@pytest.fixture(params=list(SMALL))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return SMALL[request.param]


def tokens_of(config: ModelConfig, b: int, s: int, seed: int = 0) -> Tensor:
    return torch.randint(config.vocab, (b, s), generator=torch.Generator().manual_seed(seed))


def test_presets_have_the_published_sizes() -> None:
    billions = {
        "llama3-1b": 1.236,
        "llama3-8b": 8.030,
        "llama3-70b": 70.554,
        "llama3-405b": 405.853,
        "granite-20b": 20.07,
        "mixtral-8x7b": 46.703,
        "qwen3-0.6b": 0.596,
        "qwen3-4b": 4.022,
        "qwen3-30b-a3b": 30.532,
    }
    for label, size in billions.items():
        assert PRESETS[label].count == pytest.approx(size * 1e9, rel=1e-3)
    tiny = PRESETS["tiny"]
    assert (tiny.layers, tiny.width, tiny.heads, tiny.kv_heads, tiny.mlp, tiny.vocab) == (4, 128, 8, 4, 384, 2048)
    assert (tiny.seq_len, tiny.dtype) == (256, "fp32")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"widht": 3}, "did you mean `width`"),
        ({"experts": 8}, "the llama family does not have `experts`"),
        ({"heads": 0}, "heads"),
        ({"layers": 2.0}, "layers"),
        ({"heads": 6, "kv_heads": 4}, "KV heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"dtype": "int8"}, "int8"),
        ({"rope_scaling": {"speed": 1}}, "speed"),
        ({"family": "granite"}, "family"),
    ],
    ids=str,
)
def test_overrides_that_make_no_model(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset("tiny", overrides)


def test_unknown_preset_and_nothing_heavy() -> None:
    with pytest.raises(ValueError, match="did you mean `llama3-8b`"):
        preset("llama3-8B")
    code = "import sys, tpshard.models, tpshard.models.families.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_documents_are_computed_apart(config: ModelConfig) -> None:
    """A packed row gives each document the logits it has alone."""
    model = build(config, device="cpu", seed=1).double()
    tokens = tokens_of(config, 1, 19)
    lengths = [7, 1, 11]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    with float64():
        packed = model(tokens, documents, positions)
        alone = [model(part) for part in tokens.split(lengths, 1)]
        together = model(tokens)
    assert distance(packed.detach(), torch.cat(alone, 1).detach()) <= BOUND
    assert distance(packed.detach(), together.detach()) > 1e-3


def test_causal(config: ModelConfig) -> None:
    model = build(config, device="cpu", seed=1)
    tokens = tokens_of(config, 2, 9)
    before = model(tokens)
    tokens[:, 6] = (tokens[:, 6] + 1) % config.vocab
    after = model(tokens)
    assert before.shape == (2, 9, config.vocab)
    assert torch.equal(before[:, :6], after[:, :6]) and not torch.allclose(before[:, 6:], after[:, 6:])


def test_learned_positions_end() -> None:
    model = build(replace(SMALL["granite"], max_seq=8))
    with pytest.raises(ValueError, match="8 learned positions"):
        model(torch.zeros(1, 9, dtype=torch.int64, device="meta"))


def test_every_dim_has_a_name(config: ModelConfig) -> None:
    model = build(config)
    dims = param_dims(model)
    shapes = {label: tuple(parameter.shape) for label, parameter in model.named_parameters()}
    assert dims.keys() == shapes.keys()
    sizes: dict[str, set[int]] = {}
    for label, named in dims.items():
        for dim, size in zip(named, shapes[label]):
            assert dim in (*DIMS, "positions")
            sizes.setdefault(dim, set()).add(size)
    assert all(len(actual) == 1 for actual in sizes.values()), sizes
    assert dims["layers.0.attention.wq.weight"] == ("heads", "embed")
    assert dims["layers.0.attention.wo.weight"] == ("embed", "heads")
    assert dims["layers.0.mlp.down.weight"] == ("embed", "mlp")


class Named(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.labels: list[tuple[str, int, tuple[str, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.tpshard.named.default:
            self.labels.append((args[1], args[0].dim(), tuple(args[2])))
        return func(*args, **(kwargs or {}))


def test_activations_and_their_gradients_have_names(config: ModelConfig) -> None:
    model = build(config, device="cpu")
    with Named() as names:
        logits = model(tokens_of(config, 1, 4))
        forward = list(names.labels)
        logits.sum().backward()
    assert all(rank == len(dims) for _, rank, dims in names.labels)
    per_layer = ["q", "k", "v", "attended", "residual", "hidden", "residual"]
    assert [label for label, _, _ in forward] == ["embedded", *per_layer * config.layers, "logits"]
    assert sorted(names.labels[len(forward) :]) == sorted(forward)


def test_names_change_nothing() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = name(x, "x", "batch", "embed")
    (grad,) = torch.autograd.grad((y * y).sum(), x)
    assert torch.equal(y, x) and torch.equal(grad, 2 * x)
    with pytest.raises(AssertionError, match="2 dims"):
        name(x, "x", "batch")


class Users(nn.Module):
    """What a user might bring: a bigram model."""

    def __init__(self, vocab: int, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(vocab, width))
        self.dims = {"table": ("vocab", "embed")}
        self.initial_std = {"table": 1.0}
        self.head = Linear(width, vocab, dims=("vocab", "embed"))

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return self.head(self.table[tokens])


class Alone(nn.Module):
    """Is not told where its tokens are."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens


class Misnamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.dims = {"inner.bias": ("mlp", "embed"), "inner.wieght": ("mlp", "embed")}


class Counted(Users):
    def __init__(self) -> None:
        super().__init__(5)
        self.places = torch.nn.Parameter(torch.arange(3), requires_grad=False)


@pytest.fixture
def users_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setitem(sys.modules, "users_package", sys.modules[__name__])
    yield "users_package"


def test_a_module_of_the_users(users_package: str) -> None:
    model = build_module(f"{users_package}:Users", {"vocab": 11}, device="cpu", seed=3)
    assert param_dims(model) == {"table": ("vocab", "embed"), "head.weight": ("vocab", "embed")}
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 11)
    assert float(model.get_parameter("table").detach().std()) == pytest.approx(1.0, rel=0.2)


def test_a_module_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Bias(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.bias, self.dims = torch.nn.Parameter(torch.empty(7)), {'bias': ('vocab',)}\n"
        "    def forward(self, tokens, documents=None, positions=None):\n"
        "        return self.bias.expand(*tokens.shape, 7)\n"
    )
    code = "from tpshard.models import build_module; print(build_module('mine:Bias').bias.shape)"
    script = tmp_path / "elsewhere" / "run.py"  # its folder is what Python puts on the path, not the working directory
    script.parent.mkdir()
    script.write_text(code)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([7])\n"


def test_a_file_with_the_name_of_another_module_is_told_which_one_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sched.py").write_text("def half(): ...\n")
    with pytest.raises(ValueError, match=r"sched has no half; it is .*sched.py, found before ./sched.py"):
        import_object("schedule.name", "sched:half")
    (tmp_path / "sys.py").write_text("")
    with pytest.raises(ValueError, match=r"sys has no half; it is a module of Python, found before ./sys.py"):
        import_object("schedule.name", "sys:half")
    (tmp_path / "only_here.py").write_text("")
    with pytest.raises(ValueError, match=r"only_here has no half$"):
        import_object("schedule.name", "only_here:half")


@pytest.mark.parametrize(
    ("path", "args", "message"),
    [
        ("users_package.Users", {}, "package:Class"),
        ("users_package:Missing", {}, "has no Missing"),
        ("no_such_package:Users", {}, "no_such_package"),
        ("users_package:tokens_of", {}, "not a class"),
        ("users_package:Users", {"colour": 1}, "does not take these args"),
        (
            "users_package:Misnamed",
            {},
            r"`inner.bias` has 1 dims, .*; `inner.wieght` has named dims and is no parameter",
        ),
        ("users_package:Counted", {}, r"not fp32, bf16 or fp16: places \(torch.int64\)"),
        ("users_package:Alone", {}, r"define forward\(tokens, documents=None, positions=None\)"),
    ],
)
def test_modules_that_do_not_do(users_package: str, path: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_module(path, args)


def test_initial_values_are_the_same_in_any_blocks() -> None:
    plan = init_plan(build(SMALL["llama"]))
    for label, cuts in {"layers.1.mlp.gate.weight": (7, 13), "tok_embed.weight": (31, 1), "norm.weight": (5,)}.items():
        shape = plan[label].shape
        whole = initial_block(plan, label, (0,) * len(shape), shape, seed=5)
        assembled = torch.empty(shape)
        starts = [range(0, size, cut) for size, cut in zip(shape, cuts)]
        for start in torch.cartesian_prod(*[torch.tensor(list(s)) for s in starts]).reshape(-1, len(shape)).tolist():
            sizes = [min(cut, size - first) for cut, size, first in zip(cuts, shape, start)]
            block = initial_block(plan, label, start, sizes, seed=5)
            assembled[tuple(slice(a, a + n) for a, n in zip(start, sizes))] = block
        assert torch.equal(assembled, whole)
        assert initial_block(plan, label, (0,) * len(shape), (0,) * len(shape), seed=5).numel() == 0


def test_initial_values_look_random() -> None:
    plan = init_plan(build(preset("tiny")))
    label = "layers.0.mlp.gate.weight"
    value = initial_block(plan, label, (0, 0), (384, 128), seed=0)
    bell = value * 128**0.5
    assert abs(float(bell.mean())) < 0.02 and float(bell.std()) == pytest.approx(1.0, rel=0.02)
    share = torch.tensor([float((bell.abs() < z).float().mean()) for z in (0.5, 1.0, 2.0)])
    torch.testing.assert_close(share, torch.tensor([0.383, 0.683, 0.954]), atol=0.03, rtol=0)
    for other in (
        initial_block(plan, label, (0, 0), (384, 128), seed=1),
        initial_block(plan, "layers.1.mlp.gate.weight", (0, 0), (384, 128), seed=0),
        value.roll(1, 0),
        value.roll(1, 1),
    ):
        assert abs(float(torch.corrcoef(torch.stack([value.flatten(), other.flatten()]))[0, 1])) < 0.02
    assert float(initial_block(plan, "norm.weight", (3,), (2,), seed=0).mean()) == 1.0
    half = initial_block(plan, label, (0, 0), (384, 128), seed=0, dtype=torch.bfloat16)
    assert torch.equal(half, value.bfloat16())


@pytest.mark.parametrize(("starts", "sizes"), [((0, 0), (385, 1)), ((-1, 0), (1, 1)), ((0,), (1,))])
def test_blocks_outside_a_parameter(starts: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not inside"):
        initial_block(build(preset("tiny")), "layers.0.mlp.gate.weight", starts, sizes, seed=0)
    with pytest.raises(ValueError, match="no parameter"):
        initial_block(build(preset("tiny")), "layers.9.mlp.gate.weight", starts, sizes, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_equals_torchs(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 5, 41, generator=torch.Generator().manual_seed(0)) * 30).to(dtype).requires_grad_()
    targets = torch.randint(41, (3, 5), generator=torch.Generator().manual_seed(1))
    targets[0, :2] = -100
    loss, count = cross_entropy_sum(logits, targets)
    reference = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.dtype == torch.float32 and int(count) == 13
    torch.testing.assert_close(loss, reference)
    got, expected = (torch.autograd.grad(value * 0.7, logits)[0] for value in (loss, reference))
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected)


def test_a_batch_without_targets_costs_nothing() -> None:
    logits = torch.randn(1, 2, 5, requires_grad=True)
    loss, count = cross_entropy_sum(logits, torch.full((1, 2), -100))
    assert loss.item() == 0.0 and int(count) == 0
    assert not torch.autograd.grad(loss, logits)[0].any()


def reductions(graph: torch.fx.Graph, size: int) -> list[str]:
    """Ops that take a whole last dim of `size` and give less."""
    result = []
    for node in graph.nodes:
        for operand in node.all_input_nodes if node.op == "call_function" else []:
            shapes = [getattr(n.meta.get("val"), "shape", (0,)) for n in (operand, node)]
            if len(shapes[0]) == 3 and shapes[0][-1] == size and shapes[1][-1:] != (size,):
                result.append(str(node.target))
    return result


def test_loss_reduces_the_vocabulary_three_times() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss, _ = cross_entropy_sum(logits, targets)
        return loss, torch.autograd.grad(loss, logits)[0]

    operands = (torch.randn(2, 3, 17, requires_grad=True), torch.zeros(2, 3, dtype=torch.int64))
    graph = make_fx(step, tracing_mode="fake")(*operands).graph
    assert reductions(graph, 17) == ["aten.amax.default", "aten.sum.dim_IntList", "aten.gather.default"]


def test_training_step_traces_to_few_operations() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    model = build(preset("tiny"), dtype=torch.bfloat16)
    names = [label for label, _ in model.named_parameters()]

    def step(values: list[Tensor], tokens: Tensor, targets: Tensor, documents: Tensor, positions: Tensor) -> object:
        arguments = (tokens, documents, positions)
        logits = torch.func.functional_call(model, dict(zip(names, values)), arguments)
        return torch.autograd.grad(cross_entropy_sum(logits, targets)[0], values)

    with FakeTensorMode():
        values = [torch.empty(p.shape, dtype=p.dtype).requires_grad_() for p in model.parameters()]
        integers = [torch.zeros(8, 256, dtype=torch.int64) for _ in range(4)]
        graph = make_fx(step, tracing_mode="fake")(values, *integers).graph
    targets = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert len(targets) <= 48, sorted(targets)
    assert {"tpshard.attention.default", "tpshard.attention_backward.default"} <= targets
    for node in graph.nodes:  # nothing merges batch with heads
        if node.target is torch.ops.aten.view.default:
            before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
            assert len(before) != 4 or after[:2] == before[:2], (before, after)


def test_sources_name_no_device_of_parallelism() -> None:
    """models/ and parallelism/ know nothing of each other."""
    for path in (Path(__file__).parents[2] / "models").rglob("*.py"):
        assert "tpshard.parallelism" not in path.read_text() and "tpshard.recipes" not in path.read_text(), path
