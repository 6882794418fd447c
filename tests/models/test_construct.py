"""A user's module begins with the values of its own constructor, computed parameter by parameter."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from tpshard.models import build_module
from tpshard.models.construct import Constructor, Unset
from tpshard.models.initialization import init_plan, initial_block
from tpshard.models.module_model import ModuleModel


class Block(nn.Module):
    """ReZero's zero, LayerScale's 1e-4, orthogonal and truncated values, and a part overwritten later."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.norm = nn.LayerNorm(width)
        self.gate, self.scale = nn.Parameter(torch.zeros(())), nn.Parameter(rate * torch.ones(width))
        self.mix, self.cut = nn.Linear(width, width, bias=False), nn.Parameter(torch.empty(9, width))
        nn.init.orthogonal_(self.mix.weight)
        nn.init.trunc_normal_(self.cut, std=0.5, a=-0.6, b=0.6)
        with torch.no_grad():
            self.norm.weight[1:3] = 7.0


class Whole(nn.Module):
    """Values of every kind, set while modules are made, by `apply` and from other parameters."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0.1, 0.2, 2)] if reads else [0.1, 0.2]
        self.table = nn.Embedding(12, 8, padding_idx=3)
        self.blocks = nn.ModuleList(Block(8, rate) for rate in rates)
        self.decay = nn.Parameter(torch.log(torch.arange(1, 9).float().repeat(3, 1)))
        self.logit_scale, self.identity = nn.Parameter(torch.tensor(math.log(1 / 0.07))), nn.Parameter(torch.eye(8))
        self.drawn, self.left = nn.Parameter(torch.randn(5, 8) * 0.1), nn.Parameter(torch.empty(8, 8))
        self.named, self.initial_std = nn.Parameter(torch.ones(4, 4)), {"named": 0.5}
        self.apply(self._init)
        self.copy = nn.Parameter(self.blocks[0].mix.weight.detach().T.clone())
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.MultiheadAttention):
            module.in_proj_weight.data.normal_(0.0, 0.02)

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return self.head(self.table(tokens))


class Partly(nn.Module):
    """A parameter of which one value is set."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.weight.data[1] = 2.0

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return tokens * self.weight[0]


@pytest.fixture(autouse=True)
def own_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "own_values", sys.modules[__name__])
    yield


@pytest.mark.parametrize("reads", [False, True])
def test_initial_values_are_those_of_the_seeded_constructor(reads: bool) -> None:
    """Any block of each, on any rank; except for what the module names, and what the constructor leaves empty."""
    torch.manual_seed(5)
    expected = dict(Whole(reads).named_parameters())
    state = torch.get_rng_state()
    spec = ModuleModel("own_values:Whole", {"reads": reads})
    plan = init_plan(spec.build())
    for name, value in expected.items():
        starts = tuple(size // 3 for size in value.shape)
        sizes = tuple(size - start for size, start in zip(value.shape, starts))
        actual = spec.initial_block(name, starts, sizes, 5)
        if name in ("named", "left"):
            assert torch.equal(actual, initial_block(plan, name, starts, sizes, 5)), name
        else:
            assert torch.equal(actual, value[tuple(map(slice, starts, value.shape))]), name
    assert torch.equal(torch.get_rng_state(), state), "the process draws other numbers than before"
    model = spec.build(device="cpu", seed=5)
    assert all(
        torch.equal(model.get_parameter(name), v) for name, v in expected.items() if name not in ("named", "left")
    )
    assert model.head.weight is model.table.weight


def test_values_are_rounded_once_to_another_dtype() -> None:
    torch.manual_seed(1)
    drawn = Whole().drawn
    model = build_module("own_values:Whole", device="cpu", dtype=torch.bfloat16, seed=1)
    assert torch.equal(model.get_parameter("drawn"), drawn.to(torch.bfloat16))


def test_a_value_needs_the_memory_of_its_own_parameter() -> None:
    """The constructor runs on tensors without storage."""
    constructor = Constructor(Whole, 5)
    assert not constructor._values
    made = [torch.Size(ref.size).numel() for entry in constructor._needed_by("drawn") for ref in entry.results]
    assert made and max(made) == 40


def test_a_parameter_of_which_a_part_is_set_is_a_mistake() -> None:
    with pytest.raises(Unset, match="sets 1 of the 4 values of `weight`"):
        Constructor(Partly, 0).value("weight")
    with pytest.raises(ValueError, match=r"own_values:Partly.*sets 1 of the 4"):
        ModuleModel("own_values:Partly").initial_block("weight", (0,), (4,), 0)


class Named(nn.Module):
    """A table whose values a function sets, and a tied head."""

    def __init__(self, **functions: object) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        self.init_functions: object = functions.get("all", {"head.weight": functions.get("of", nn.init.orthogonal_)})

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return self.head(self.table(tokens))


def _doubled(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, 2.0)


def test_a_modules_functions_set_values_on_every_rank_alike() -> None:
    """By any name of a tied parameter, in place or returned; other seeds give other values."""
    spec = ModuleModel("own_values:Named")
    table = spec.build(device="cpu", seed=5).get_parameter("table.weight").detach()
    torch.testing.assert_close(table.T @ table, torch.eye(8))
    assert torch.equal(spec.initial_block("table.weight", (3, 1), (4, 5), 5), table[3:7, 1:6])
    assert not torch.equal(spec.initial_block("table.weight", (0, 0), (12, 8), 6), table)
    returned = ModuleModel("own_values:Named", {"of": _doubled}).build(device="cpu")
    assert bool((returned.get_parameter("table.weight") == 2.0).all())


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"all": nn.init.zeros_}, "`init_functions` is not a map"),
        ({"all": {"tabel.weight": nn.init.zeros_}}, "`tabel.weight` has init_functions and is no parameter"),
        ({"of": 0.02}, "is no function of a tensor"),
        ({"of": nn.init.constant_}, "fails: .*val"),
        ({"of": lambda tensor: tensor.T.clone()}, r"makes \[8, 12\] of \[12, 8\]"),
    ],
)
def test_a_wrong_function_is_refused_before_anything_runs(functions: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_module("own_values:Named", functions)


def test_a_function_that_sets_a_part_is_a_mistake() -> None:
    spec = ModuleModel("own_values:Named", {"of": lambda tensor: tensor[0].zero_().expand(12, 8)})
    assert bool((spec.initial_block("table.weight", (0, 0), (12, 8), 0) == 0).all())

    def first_row(tensor: Tensor) -> None:
        tensor[0].zero_()

    with pytest.raises(ValueError, match="sets 8 of the 96 values"):
        ModuleModel("own_values:Named", {"of": first_row}).initial_block("table.weight", (0, 0), (12, 8), 0)
