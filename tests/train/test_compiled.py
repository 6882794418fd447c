"""`compile: inductor` and `blocks` agree with `compile: eager`, on two processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from tpshard.models.family_model import FamilyModel
from tpshard.parallelism.pricing.fusion import Compiled
from tpshard.parallelism.runtime.compiled import _layouts, compile_graph, own_cache
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.parallelism.runtime.regions import CompiledRegion
from tpshard.parallelism.simulate import cut
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

RECIPE = """
name: small
cluster: {device: cpu}
mesh: {fsdp: 2}
model: {preset: tiny, layers: 3, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 24, vocab: 32, seq_len: 8}
batch: {global_sequences: 4}
"""


def both(context: Context, compiled: Compiled, *overrides: str) -> tuple[list[float], int, int]:
    """How far compiled results are from interpreted ones, relative, per output; how many regions there are, and how
    many were compiled."""
    setting = Setting.of(loads(RECIPE, overrides))
    program = training.build(setting).micro
    recipe = setting.recipe.model
    spec = FamilyModel.of_preset(recipe.preset, recipe.overrides())
    generator = torch.Generator().manual_seed(1 + context.rank)
    inputs = []
    for port in program.inputs:
        if port.kind == "parameter":
            whole = spec.initial_block(port.name, (0,) * len(port.shape), port.shape, seed=0, dtype=port.dtype)
            inputs.append(cut(whole, port.layout, program.mesh, context.rank).contiguous())
        elif port.kind == "gradient":
            inputs.append(torch.zeros(port.local))
        elif port.name == "positions":
            inputs.append(torch.arange(port.local[-1]).expand(port.local).contiguous())
        elif port.name == "documents":
            inputs.append(torch.zeros(port.local, dtype=torch.int64))
        else:
            inputs.append(torch.randint(0, 32, port.local, generator=generator))
    executor = Executor(program, context, compiled=compiled)
    executed = executor(*[tensor.clone() for tensor in inputs])
    regions = [n.target for n in executor.module.graph.nodes if isinstance(n.target, CompiledRegion)]
    result = {id(code) for region in regions for code in region.shared.values()}
    eager = Executor(program, context)(*inputs)
    return distances(executed, eager), len(regions), len(result)


def distances(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    return [float((a - b).float().norm() / b.float().norm().clamp(min=1e-9)) for a, b in zip(actual, expected)]


MIXTURE = (
    "mesh={fsdp: 1, ep: 2}", "sharding.dropless.form=all_to_all",
    "model={preset: tiny-moe, layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 24, experts: 4, top_k: 1,"
    " norm_top_k: false, vocab: 32, seq_len: 64}",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "pieces"), [((), False), (MIXTURE, True), (("offload=activations", "model.seq_len=64"), True)]
)
def test_inductor_runs_the_same_program_in_pieces_where_it_must(pool, overrides: Any, pieces: bool) -> None:
    """Around control flow, and copies to the host's memory."""
    mesh = {"dp": 1, "fsdp": 1, "ep": 2, "tp": 1} if overrides == MIXTURE else {"dp": 1, "fsdp": 2, "tp": 1}
    for actual, regions, _ in pool.run(both, "all", *overrides, world=2, mesh=mesh):
        assert max(actual) < 1e-5 and (regions > 1) == pieces


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="fsdp", marks=pytest.mark.slow),
        pytest.param(("mesh.fsdp=1", "mesh.tp=2", "remat=full"), id="tp"),
    ],
)
def test_blocks_run_the_same_program_and_alike_ones_are_compiled_once(pool, overrides: tuple[str, ...]) -> None:
    mesh = {"dp": 1, "fsdp": 1, "tp": 2} if overrides else {"dp": 1, "fsdp": 2, "tp": 1}
    for actual, regions, compiled in pool.run(both, "layers", *overrides, world=2, mesh=mesh):
        assert max(actual) < 1e-5
        assert compiled < regions / 2, "three layers"


def test_compiled_code_is_found_again_for_the_same_layouts() -> None:
    """Another process, such as a run that goes on, need not compile again."""
    from torch._dynamo.utils import counters

    graph = fx.symbolic_trace(lambda x: [torch.ops.aten.add(torch.ops.aten.sin(x), 3.25)]).graph
    x = torch.arange(6.0).reshape(2, 3)
    for _ in range(2):
        (found,) = compile_graph(fx.GraphModule({}, graph), [x])([x])
        assert torch.equal(found, x.sin() + 3.25)
    assert counters["inductor"]["fxgraph_cache_hit"] and not counters["inductor"]["fxgraph_cache_bypass"]
    wide, long = fx.symbolic_trace(lambda x: [x.sin()]), fx.symbolic_trace(lambda x: [x.sin()])
    for module, values in ((wide, torch.empty(2, 3)), (long, torch.empty(3, 2).t())):
        next(iter(module.graph.nodes)).meta["val"] = values
    assert _layouts(wide.graph) != _layouts(long.graph)


def test_code_for_other_instructions_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that hosts share has the code of all of them: with another one's, workers died or computed NaN."""
    from torch._dynamo.utils import counters

    def misses() -> int:
        before = counters["inductor"]["fxgraph_cache_miss"]
        module = fx.symbolic_trace(lambda x: [torch.ops.aten.add(torch.ops.aten.cos(x), 4.75)])
        compile_graph(module, [torch.ones(2, 3)])
        return int(counters["inductor"]["fxgraph_cache_miss"] - before)

    misses()
    assert not misses()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", f"OTHER{time.time_ns()}")
    assert misses() == 1
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: f"other {time.time_ns()}")
    assert misses() == 1 and not counters["inductor"]["fxgraph_cache_bypass"]


def test_compiled_code_is_loaded_from_a_folder_that_others_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mine = own_cache.__wrapped__()
    assert mine == tmp_path / "tpshard" / "inductor" and mine.stat().st_mode & 0o777 == 0o700
    mine.chmod(0o777)
    for cache in (tmp_path, Path("/proc/none")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        other = own_cache.__wrapped__()
        assert other != mine and other.stat().st_mode & 0o777 == 0o700
        assert own_cache.__wrapped__() != other, "its name can be foretold"
