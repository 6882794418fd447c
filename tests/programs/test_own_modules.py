"""What a user's module says beside its parameters' values is obeyed, or refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.models.transformers.architecture import Architecture
from tpshard.models.transformers.class_weights import write_folder
from tpshard.programs.parts import step_programs
from tpshard.programs.parts.checks import traceable
from tpshard.programs.server.serve_setting import ServeSetting
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads

import every_class

VOCAB, WIDTH = 32, 8


class Net(nn.Module):
    """A linear between a table and a head; kinds of modules differ in what they add."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.up = kind, nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        getattr(self, f"_{kind}", lambda: None)()

    def _parametrized(self) -> None:
        parametrizations.weight_norm(self.up)

    def _weight_norm(self) -> None:
        weight_norm(self.up)

    def _shared(self) -> None:
        self.again, self.tied = self.up, nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.up.weight
        self.up = nn.Sequential(self.up, self.again, self.tied)

    def _hooks(self) -> None:
        self.up.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
        self.up.register_forward_hook(lambda _, __, output: output + 1)
        self.up.register_full_backward_hook(lambda _, gradients, __: tuple(g * 2 for g in gradients))

    def _evaluating(self) -> None:
        self.up = nn.Sequential(self.up, nn.Dropout(0.5).eval())

    def _names(self) -> None:
        self.lists = nn.ParameterList([torch.ones(WIDTH), torch.full((), 2.0), torch.ones(0)])
        self.odd = nn.ParameterDict(
            {"a/b": torch.ones(WIDTH), "x y": torch.ones(WIDTH), "\u00fc*[1]": torch.ones(WIDTH)}
        )

    def _mixed(self) -> None:
        self.up.to(torch.bfloat16)

    def _gradient_hook(self) -> None:
        self.up.weight.register_hook(lambda gradient: gradient * 2)

    def _tensor(self) -> None:
        self.masks = {"causal": torch.ones(WIDTH)}

    def _lazy(self) -> None:
        self.up = nn.LazyLinear(WIDTH)

    def _renormed(self) -> None:
        self.embed = nn.Embedding(VOCAB, WIDTH, max_norm=1.0)

    def _constants(self) -> None:
        """Buffers of every kind that forward reads: stored or not, drawn, shared, complex, of integers."""
        angles = torch.arange(8.0)[:, None] / torch.arange(1.0, WIDTH // 2 + 1)
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))
        self.register_buffer("order", torch.arange(8).flip(0))
        self.register_buffer("seen", torch.arange(8) > 2, persistent=False)
        self.register_buffer("features", torch.randn(WIDTH, WIDTH), persistent=False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.up.register_buffer("scale", self.scale)
        self.register_buffer("none", None)

    def _read_constants(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.turn).flatten(-2)
        x = self.mask @ turned[:, self.order] * self.scale + torch.where(self.seen[:, None], x, 0.0)
        return self.up(x @ self.features.to(x.dtype)) * self.up.scale

    def _normalized(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def _averaging(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))

    def _counting(self) -> None:
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def _permuted(self) -> None:
        self.register_buffer("order", torch.randperm(8))

    def _attributes(self) -> None:
        self.calls, self.shapes, self.cache = 0, [1], None

    def _fails(self) -> None:
        raise KeyError("no width")

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Any:
        x = self.embed(tokens)
        if self.kind == "checkpoints":
            x = checkpoint(self.up, checkpoint(self.up, x, use_reentrant=True), use_reentrant=False)
        elif self.kind == "mixed":
            x = self.up(x.bfloat16()).to(x.dtype)
        elif self.kind == "constants":
            x = self._read_constants(x)
        else:
            x = self.up(x)
        if self.kind == "normalized":
            x = self.norm(x.mT).mT
        if self.kind == "averaging":
            self.average = 0.9 * self.average + 0.1 * x.mean((0, 1))
        if self.kind == "counting":
            self.steps += 1
        if self.kind == "attributes":
            self.calls += 1
            self.shapes.append(len(self.shapes))
            self.cache = torch.tril(x.new_ones(8, 8)) if self.cache is None else self.cache
            x = self.cache @ x * self.calls
        if self.kind == "names":
            for value in (self.lists[0], self.lists[1], *self.odd.values()):
                x = x * value
            x = x + self.lists[2].sum()
        logits = self.head(x)
        return {"tuple": (logits,), "flat": logits[0]}.get(self.kind, logits)


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "own_modules", sys.modules[__name__])
    yield


def setting_of(kind: str, sections: dict[str, Any] | None = None, model: dict[str, Any] | None = None) -> Setting:
    recipe = {
        "schema": 1, "name": "own", "mesh": {"fsdp": 2, "tp": 2}, "batch": {"global_sequences": 4},
        "cluster": {"device": "cpu", "nodes": 1, "devices_per_node": 4}, "data": {"source": "sample"},
        "model": {"module": "own_modules:Net", "args": {"kind": kind}, "seq_len": 8, "dtype": "fp32", **(model or {})},
        **(sections or {}),
    }  # fmt: skip
    return Setting.of(loads(json.dumps(recipe), [], file="recipe.yaml"))


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "parametrized",
        "weight_norm",
        "shared",
        "hooks",
        "evaluating",
        "names",
        "checkpoints",
        "mixed",
        "constants",
        "attributes",
    ],
)
def test_a_step_is_torchs_own(kind: str) -> None:
    """Loss and every gradient, on two dims of a mesh; a parameter of its own dtype is used in it."""
    setting = setting_of(kind)
    program = step_programs.micro_program(setting)
    torch.manual_seed(0)
    own = Net(kind)
    tokens, targets = torch.randint(0, VOCAB, (2, 4, 8))
    loss = F.cross_entropy(own(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    own_values = {**dict(own.named_buffers()), **dict(own.named_parameters())}
    values = {name: own_values[name].detach().float() for name, _ in setting.model.named_parameters()}
    assert values.keys() == {name for name, value in own_values.items() if value.is_floating_point()}
    for name, value in values.items():
        torch.testing.assert_close(
            setting.spec.initial_block(name, (0,) * value.dim(), value.shape, 0), value, rtol=0, atol=0, msg=name
        )
    batch = {"tokens": tokens, "targets": targets, "documents": torch.zeros_like(tokens)}
    batch["positions"] = torch.arange(8).expand(4, 8).contiguous()
    inputs = {port.name for port in program.inputs}
    trained = [name for name in values if name + step_programs.SUM in inputs]
    sums = [torch.zeros_like(values[name]) for name in trained]
    bound = {"rtol": 0.02, "atol": 0.05} if kind == "mixed" else {"rtol": 1e-5, "atol": 1e-4}
    simulated, _, *gradients = program.simulate(
        *values.values(), *sums, *(batch[field] for field in setting.task.fields)
    )
    torch.testing.assert_close(simulated, loss.detach(), **bound)
    for name, gradient in zip(trained, gradients):
        torch.testing.assert_close(gradient, own.get_parameter(name).grad.float(), **bound, msg=name)
    assert {name for name, p in own.named_parameters() if p.grad is not None} == set(trained)
    noted = {"mixed": "up.weight, up.bias in bfloat16", "attributes": "changes `cache`, `calls`, `shapes`: a step's",
             "constants": "that nothing trains: `mask`, `features`, `scale`"}  # fmt: skip
    for other, words in noted.items():
        assert any(words in note for note in setting.notes) == (kind == other), (other, setting.notes)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gradient_hook", "hooks on gradients of up.weight"),
        ("tensor", "holds the tensors masks"),
        ("lazy", "parameters without a shape yet: up.weight, up.bias"),
        ("renormed", "forward pass of Net changes `embed.weight`"),
        ("normalized", "in training it writes to the buffer `norm.running_mean`, `norm.running_var`; set"),
        ("averaging", "forward pass of Net writes to the buffer `average`"),
        ("counting", "forward pass of Net writes to the buffer `steps`"),
        ("permuted", "buffer `order` is drawn at random, and torch.int64 is not stored"),
        ("fails", "its constructor fails: KeyError: 'no width', at `raise KeyError"),
        ("tuple", "Net returns a tuple, and `task: lm` needs logits"),
        ("flat", r"Net returns a tensor \[8, 32\], and `task: lm` needs logits"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(kind: str, message: str) -> None:
    setting = setting_of(kind)
    with pytest.raises(Mistakes, match=message), traceable(setting):
        step_programs.micro_program(setting)


@pytest.mark.parametrize(("name", "dtype"), [("deepseek_v3", "bf16"), ("gpt_oss", "fp16"), ("gpt_oss", "bf16")])
def test_what_a_class_keeps_in_fp32_is_used_and_served_in_it(name: str, dtype: str, tmp_path: Path) -> None:
    """Each parameter has the dtype with which transformers loads it."""
    config = every_class.small(every_class.classes()[name])
    folder = tmp_path / name
    torch.manual_seed(0)
    Architecture(config).cls(Architecture(config).config).save_pretrained(folder)
    loaded = Architecture(config).cls.from_pretrained(
        folder, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    )
    recipe = {
        "schema": 1, "name": "own", "mesh": {"fsdp": 1}, "model": {"transformers": str(folder), "seq_len": 8},
        "data": {"source": "sample"}, "serve": {"checkpoint": str(folder), "dtype": dtype},
        "fsdp": {"param_dtype": dtype},
    }  # fmt: skip
    read = loads(json.dumps(recipe), [], file="recipe.yaml")
    setting, served = Setting.of(read), ServeSetting.of(read, model_to_serve(read, "cpu"), "cpu").model
    expected = {
        path: value.dtype for path, value in {**dict(loaded.named_buffers()), **dict(loaded.named_parameters())}.items()
    }
    for path, parameter in served.named_parameters():
        assert parameter.dtype == setting.used_dtype(path) == expected[path], path
    written = tmp_path / "written"
    architecture = Architecture(config)
    write_folder(architecture, lambda path: torch.zeros(architecture.shapes[path]), written, dtype=setting.param_dtype)
    stored = load_file(written / "model.safetensors")
    assert {path: value.dtype for path, value in stored.items()} == {path: expected[path] for path in stored}
    assert any(torch.float32 == setting.used_dtype(path) for path in expected) == ((name, dtype) != ("gpt_oss", "bf16"))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"batch": ["dp", "fsdp"], "width": "tp", "mlp": "fsdp"}, "`sharding.rules.mlp` has no effect: no tensor of o"),
        ({"batch": ["dp", "fsdp"], "width": "tp"}, "no rule shards the dim `wdth` of own_modules:Net: is it `width`?"),
    ],
)
def test_dims_that_no_rule_and_no_tensor_has_are_named(rules: dict[str, Any], message: str) -> None:
    dims = {"up.weight": ["width", "wdth"]}
    program = step_programs.micro_program(setting_of("plain", {"sharding": {"rules": rules}}, {"dims": dims}))
    assert any(warning.startswith(message) for warning in program.warnings), program.warnings
    plain = step_programs.micro_program(setting_of("plain"))
    assert not any("no rule" in warning or "no tensor" in warning for warning in plain.warnings)


def test_an_annotation_of_a_dim_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Mistakes, match="`sqe` has no rule and is not a dim of own_modules:Net"):
        step_programs.micro_program(setting_of("plain", {"sharding": {"annotate": {"up.weight": ["sqe", None]}}}))
