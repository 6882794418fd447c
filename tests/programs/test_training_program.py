"""A Llama's micro-batch is right on every mesh, sends nothing needless, and every reason names a recipe's line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planted_faults import FAULTS, plant
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.parallelism import Program
from tpshard.parallelism.runtime.execute import localize
from tpshard.parallelism.runtime.groups import Groups
from tpshard.programs.compare.float64 import BOUND, distance, float64
from tpshard.programs.parts import step_programs
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import load

torch.set_num_threads(1)
SEQUENCE = ["sharding.rules.seq_sp=tp", "sharding.annotate={'layers.*.residual': [batch, seq_sp, embed], embedded: "
            "[batch, seq_sp, embed]}"]  # fmt: skip
PLAIN = ["fsdp.param_dtype=fp32", "fsdp.reduce_dtype=fp32"]
TINY = [
    "model.width=128",
    "model.head_dim=32",
    "model.kv_heads=4",
    "model.mlp=256",
    "model.vocab=512",
    "model.seq_len=64",
]
"""Large enough that bytes count, not only the number of messages; as many KV heads as devices of tp."""
SCRATCH = """\
schema: 1
mesh: MESH
model: {preset: tiny, width: 24, heads: 4, kv_heads: 2, head_dim: 6, mlp: 40, vocab: 96, seq_len: 12, layers: 2}
data: {source: sample}
batch: {global_sequences: 12}
"""


@lru_cache(maxsize=1)
def folder() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="tpshard-recipe-"))


def setting(mesh: str, *overrides: str, text: str = SCRATCH) -> Setting:
    path = folder() / "recipe.yaml"
    path.write_text(text.replace("MESH", mesh))
    return Setting.of(load(str(path), overrides))


def layouts_by_name(program: Program) -> dict[str, tuple[Any, ...]]:
    """The layout of every named value."""
    return {name: record.layout for name, record in program.records.items()}


# ---- right ----------------------------------------------------------------------------------------------------
MESHES = ["{}", "{fsdp: 2}", "{fsdp: 3}", "{tp: 2}", "{fsdp: 2, tp: 2}", "{dp: 2, fsdp: 2}", "{dp: 2, fsdp: 2, tp: 2}"]


@pytest.mark.parametrize(("mesh", "overrides"), [
    *((mesh, []) for mesh in MESHES), ("{fsdp: 2, tp: 2}", SEQUENCE), ("{fsdp: 2, tp: 4}", []),
    ("{fsdp: 5}", ["batch.global_sequences=10"]), ("{fsdp: 2, tp: 2}", ["model.tie_embeddings=true"]),
])  # fmt: skip
def test_loss_and_gradients_equal_one_device(mesh: str, overrides: list[str]) -> None:
    settings = setting(mesh, *PLAIN, *overrides)
    assert_trains_as_one_device(settings, step_programs.micro_program(settings))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    settings = setting("{fsdp: 2, tp: 2}", *PLAIN)
    with pytest.raises(AssertionError):
        assert_trains_as_one_device(settings, plant(step_programs.micro_program(settings), FAULTS[fault]))


def assert_trains_as_one_device(settings: Setting, program: Program) -> None:
    """Asserts that two accumulated micro-batches equal autograd in float64."""
    generator = torch.Generator().manual_seed(1)
    model = settings.model.to_empty(device="cpu").double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * noise if name.endswith("norm.weight") else 0.3 * noise)
    params = {n: p.detach() for n, p in model.named_parameters()}
    sums = [torch.zeros_like(p) for p in params.values()]
    expected = {n: torch.zeros_like(p) for n, p in params.items()}
    rows = settings.batch.per_device * settings.batch.data_ranks
    for _ in range(2):
        batch = batch_of(rows, 12, 96, generator)
        with float64():
            loss, count, *sums = program.simulate(*params.values(), *sums, *batch)
            want, tokens, grads = eager(model, batch)
        assert distance(loss, want) <= BOUND
        assert int(count) == int(tokens)
        for name, grad in grads.items():
            expected[name] += grad
    for (name, want), got in zip(expected.items(), sums, strict=True):
        assert distance(got, want) <= BOUND, name


def batch_of(rows: int, length: int, vocab: int, generator: torch.Generator) -> list[Tensor]:
    tokens = torch.randint(0, vocab, (rows, length), generator=generator)
    targets = torch.randint(0, vocab, (rows, length), generator=generator)
    targets[:, -1] = -100
    documents = torch.zeros(rows, length, dtype=torch.int64)
    documents[:, length // 3 :] = 1
    positions = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)]).repeat(rows, 1)
    return [tokens, targets, documents, positions]


def eager(model: torch.nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    tokens, targets, documents, positions = batch
    loss, count = cross_entropy_sum(model(tokens, documents, positions), targets)
    names = [n for n, _ in model.named_parameters()]
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), count, dict(zip(names, grads))


# ---- nothing sent in vain -------------------------------------------------------------------------------------
class Counting(TorchDispatchMode):
    """Counts the collectives that a running program issues: (op, group, elements of its tensor)."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[tuple[str, str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            self.issued.append((func.overloadpacket.__name__.removesuffix("_out"), args[-1], args[0]))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def alone() -> Iterator[Any]:
    """A process that acts as rank 0 of a world; its collectives do nothing."""

    def start(world: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def issue_order(program: Program) -> list[tuple[str, str, Tensor]]:
    """The collectives that rank 0 issues in one micro-batch."""
    groups = Groups(program.mesh)
    groups.ensure(c.refs for c in program.collectives)
    module = localize(program, 0, torch.device("cpu"), lambda t, _: torch.ops._c10d_functional.wait_tensor(t), False)
    inputs = [torch.zeros(port.local, dtype=port.dtype) for port in program.inputs]
    with torch.no_grad(), Counting() as mode:
        module(*inputs)
    groups.close()
    return mode.issued


def short(group: str) -> str:
    return "+".join(part.partition(":")[0] for part in group.split("+"))


@pytest.mark.parametrize(
    "mesh", ["{fsdp: 2, tp: 2}", "{dp: 2, fsdp: 2, tp: 2}", "{dp: 2, tp: 2}", "{fsdp: 4}", "{tp: 4}"]
)
def test_collectives_are_those_of_theory(mesh: str, alone: Any) -> None:
    layers = 3
    settings = setting(mesh, "model.layers=3", *TINY)
    program = step_programs.micro_program(settings)
    alone(program.mesh.ranks)
    calls = issue_order(program)
    tokens, width = settings.batch.per_device * settings.seq_len, settings.spec.outline.width
    parameters = len(list(settings.model.parameters()))
    assert parameters == 9 * layers + 3
    counted = Counter((op, short(group)) for op, group, tensor in calls if tensor.dim())
    axes = [name for name, size in settings.mesh.axes.items() if size > 1]
    expected: Counter[tuple[str, str]] = Counter()
    if "fsdp" in axes:
        expected["all_gather_into_tensor", "fsdp"] = parameters
        expected["reduce_scatter_tensor", "fsdp"] = parameters
    if "tp" in axes:
        expected["all_reduce", "tp"] = 4 * layers + 2 + 3
    if "dp" in axes:
        expected["all_reduce", "dp"] = parameters
    assert counted == expected
    wide = [t for op, group, t in calls if op == "all_reduce" and short(group) == "tp" and t.numel() == tokens * width]
    per_token = [t for _, group, t in calls if short(group) == "tp" and t.numel() == tokens]
    if "tp" in axes:
        assert (len(wide), len(per_token)) == (4 * layers + 2, 3)
    gathered = [t for op, _, t in calls if op == "all_gather_into_tensor"]
    assert {t.dtype for t in gathered} <= {settings.param_dtype}
    scalars = [t for _, _, t in calls if not t.dim()]
    assert len(scalars) == (2 if settings.data_axes else 0)
    by_dp = [t for op, group, t in calls if short(group) == "dp" and t.dim()]
    shards = sum(p.local_bytes // p.dtype.itemsize for p in program.inputs if p.kind == "parameter")
    assert sum(t.numel() for t in by_dp) == (shards if by_dp else 0)
    assert len(program.collectives) == len(calls)


def test_sequence_parallelism_exchanges_all_reduces_for_pairs(alone: Any) -> None:
    layers = 3
    settings = setting("{fsdp: 2, tp: 2}", "model.layers=3", *TINY, *SEQUENCE)
    program = step_programs.micro_program(settings)
    alone(4)
    tokens = settings.batch.per_device * settings.seq_len
    counted = Counter(
        (op, short(group), tensor.numel() // tokens) for op, group, tensor in issue_order(program) if tensor.dim()
    )
    assert counted["all_gather_into_tensor", "tp", 64] == counted["reduce_scatter_tensor", "tp", 128] == 4 * layers + 2
    assert {key: n for key, n in counted.items() if key[2] >= 1 and key[1] == "tp"} == {
        ("all_gather_into_tensor", "tp", 64): 4 * layers + 2,
        ("reduce_scatter_tensor", "tp", 128): 4 * layers + 2,
        ("all_reduce", "tp", 1): 3,
    }


def test_no_matmul_is_repeated() -> None:
    for mesh, more in (("{fsdp: 2, tp: 2}", []), ("{fsdp: 2, tp: 2}", SEQUENCE), ("{dp: 3}", [])):
        program = step_programs.micro_program(setting(mesh, *more))
        for node in program.nodes:
            facts = node.meta["tpshard"]
            if facts.saved:
                assert facts.global_flops == program.mesh.ranks * facts.flops, (mesh, node, facts.module)
        assert program.flop_efficiency > 0.97


# ---- propagation, not look-up ---------------------------------------------------------------------------------
PINS = """\
sharding:
  rules: {}
  pin:
    tokens: [[fsdp], []]
    tok_embed.weight: [[tp], []]
    "layers.*.attention.wq.weight": [[tp], []]
    "layers.*.mlp.gate.weight": [[tp], []]
    output.weight: [[tp], []]
"""


@pytest.mark.parametrize("layers", [2, pytest.param(126, marks=pytest.mark.slow)])
def test_five_pins_say_what_all_rules_say(layers: int) -> None:
    inputs = f"model.layers={layers}"
    ruled = step_programs.micro_program(setting("{fsdp: 2, tp: 2}", inputs))
    pinned = step_programs.micro_program(setting("{fsdp: 2, tp: 2}", inputs, text=SCRATCH + PINS))
    assert layouts_by_name(ruled) == layouts_by_name(pinned)
    assert [(c.kind, c.axes, c.bytes) for c in ruled.collectives] == [
        (c.kind, c.axes, c.bytes) for c in pinned.collectives
    ]


def test_reason_moves_with_its_line() -> None:
    def reason(text: str) -> str:
        program = step_programs.micro_program(setting("{fsdp: 2, tp: 2}", text=text))
        return program.explain("layers.1.attention.wo.weight.used")

    for shift in (0, 3):
        text = SCRATCH + "\n" * shift + PINS
        line = next(i for i, t in enumerate(text.splitlines(), 1) if "wq.weight" in t)
        assert f"recipe.yaml:{line}:" in reason(text)


def test_every_collective_says_why() -> None:
    program = step_programs.micro_program(setting("{dp: 2, fsdp: 2, tp: 2}", *SEQUENCE))
    for comm in program.collectives:
        assert comm.requested, comm
        assert any(place in comm.reason for place in ("recipe.yaml:", "<default ", "<override ")), comm
