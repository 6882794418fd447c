"""Every figure that a plan marks exact equals what the running programs do."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_recipe import RECIPE
from torch.utils._python_dispatch import TorchDispatchMode
from tpshard.devices.read import device
from tpshard.parallelism.pricing import fusion
from tpshard.parallelism.pricing.cost import Cpu, Crowd, collective
from tpshard.parallelism.pricing.fusion import kernels
from tpshard.parallelism.pricing.liveness import liveness
from tpshard.parallelism.pricing.network import Topology
from tpshard.parallelism.resharding.exchange import cpu_collective
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.plan import planner
from tpshard.plan.step import pricing
from tpshard.plan.step.pricing import StepPart, price_parts
from tpshard.plan.step.step_price import price_step, training_parts
from tpshard.programs.parts import passes, step_programs
from tpshard.programs.parts.pass_choices import compiled_by
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads


class Counting(TorchDispatchMode):
    """Counts collectives as they are dispatched: (kind, bytes of the buffer) -> times."""

    KINDS = {
        "all_gather_into_tensor": "all_gather", "all_reduce": "all_reduce", "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_out")
        kind = self.KINDS.get(name) if func.namespace == "_c10d_functional" else None
        if kind is not None:
            buffer = out if kind == "all_gather" else args[0]
            self.counts[kind, buffer.numel() * buffer.itemsize] += 1
        return out


def count_on_rank(context: Context, recipe: str) -> tuple[dict[str, list[tuple[str, int, int]]], dict[str, int]]:
    """Runs both programs of a recipe on this rank; returns the dispatched collectives and the bytes of tensors."""
    built = planner.build_programs(Setting.of(loads(recipe)))
    sent, held = {}, Counter[str]()
    for name, program in (("micro-batch", built.micro), ("update", built.update)):
        inputs = [torch.zeros(p.local, dtype=p.dtype) for p in program.inputs]
        mode = Counting()
        executor = Executor(program, context)
        with mode:
            executor(*inputs)
        sent[name] = sorted((kind, size, n) for (kind, size), n in mode.counts.items())
        for port, tensor in zip(program.inputs, inputs):
            if name == "update" and port.kind in ("parameter", "gradient", "optimizer"):
                held[port.kind] += tensor.numel() * tensor.itemsize
    return sent, dict(held)


def test_collectives_and_bytes_equal_those_dispatched_on_real_ranks(pool, planned, report):
    results = pool.run(count_on_rank, RECIPE, world=4, mesh={"dp": 1, "fsdp": 2, "tp": 2})
    priced: dict[str, Counter[tuple[str, int]]] = {}
    for part in planned.pricing.parts:
        counted = priced.setdefault(part.part.name, Counter())
        for comm in part.part.program.collectives:
            # on a CPU the executor sends some as an all-to-all, and the plan prices them as such
            counted[cpu_collective(comm.kind, comm.bytes, comm.size)] += 1
    expected = {name: sorted((k, b, n) for (k, b), n in actual.items()) for name, actual in priced.items()}
    assert expected["micro-batch"]
    for sent, held in results:
        assert sent == expected
        static = report.pricing.static_bytes
        assert held["parameter"] == static["parameters"]
        assert held["gradient"] == static["gradients"]
        assert held["optimizer"] == static["optimizer"]
    times = {p.name: p.times for p in report.pricing.parts}
    assert times == {"micro-batch": 2, "update": 1}
    assert sum(line.count for line in report.lines) == sum(
        times[name] * n for name, rows in expected.items() for _, _, n in rows
    )


class Living(TorchDispatchMode):
    """Peak bytes of the storages that are alive, counting each once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.note(tensor)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out

    def note(self, tensor: torch.Tensor) -> None:
        import weakref

        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key, None)


def test_predicted_peak_is_that_of_the_storages_alive_while_running():
    def step(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((x @ w).exp() @ v).transpose(0, 1).reshape(-1, 8).sum(0)

    from tpshard.parallelism import Mesh, partition

    args = [torch.randn(64, 32), torch.randn(32, 256), torch.randn(256, 16)]
    program = partition(step, args, Mesh({"x": 1}))
    predicted = liveness(program, kernels(program, compiled="none"))
    mode = Living()
    module = torch.fx.GraphModule({}, program.graph)
    with mode:
        for tensor in args:
            mode.note(tensor)
        module(*args)
    assert predicted.peak_bytes == pytest.approx(mode.peak, rel=0.02)


def test_of_compiled_blocks_the_loss_is_priced_as_eager(monkeypatch):
    """The vocabulary is so large that the peak is at the loss, where eager mode stores more copies of the logits."""
    overrides = ["model.vocab=65536", "mesh.tp=1", "mesh.fsdp=4", "remat=full"]
    programs = planner.build_programs(Setting.of(loads(RECIPE, [*overrides, "compile=auto", "fsdp.bucket=wrap"])))
    eager, blocks, whole = (planner.price_training(programs, compiled) for compiled in ("none", "layers", "all"))
    at_peak = [p.worst.memory.at_peak["logits_and_loss"] for p in (eager, blocks, whole)]
    assert at_peak[0] == at_peak[1] > at_peak[2]
    assert {k.compiled for k in blocks.parts[0].priced.kernels if k.work != "free"} == {True, False}
    assert eager.compute_s > blocks.compute_s > whole.compute_s
    by_size = []
    for large in (fusion.LARGE, 10):
        monkeypatch.setattr(fusion, "LARGE", large)
        planned = planner.planned_training(programs)
        told = any("compiles the layers alone" in warning for warning in planned.report.warnings)
        by_size.append((planned.report.job.compiled, planned.pricing.compute_s, told))
    assert by_size == [("inductor", whole.compute_s, False), ("blocks", blocks.compute_s, True)]


def test_recomputation_trades_memory_for_time():
    actual = {}
    for remat in ("none", "selective", "full"):
        setting = Setting.of(loads(RECIPE, [f"remat={remat}", "model.seq_len=64", "mesh.tp=1", "mesh.fsdp=4"]))
        micro = passes.apply(setting, step_programs.micro_program(setting))
        pricing = price_parts([StepPart("micro-batch", micro, compiled="none")], device("cpu"), 4)
        actual[remat] = (pricing.peak_bytes, pricing.compute_s)
    assert actual["full"][0] < actual["selective"][0] < actual["none"][0]
    assert actual["full"][1] > actual["selective"][1] > actual["none"][1]


def test_step_time_is_what_its_lanes_say(report):
    t = report.pricing
    assert t.step_s == pytest.approx(t.compute_s + t.slowed_s + t.exposed_s)
    assert 0 < t.exposed_s <= t.comm_s


def test_the_training_loop_has_work_of_its_own_and_agrees_once_a_step(programs, report):
    cpu = device("cpu")
    compiled = compiled_by(programs.setting.recipe)
    plain, trained = price_parts(training_parts(programs, compiled), cpu, 4), price_step(programs, cpu, 4, compiled)
    everyone = tuple(map(programs.setting.mesh.axis, ("fsdp", "tp")))
    agreed = collective(cpu.shared_by(4), Topology(programs.setting.mesh, 4), "all_reduce", everyone, 8)
    assert agreed.seconds > 0 and cpu.shared_by(4).overhead.step_s > 0
    assert trained.step_s - plain.step_s == pytest.approx(agreed.seconds + cpu.shared_by(4).overhead.step_s)
    assert report.pricing.step_s == pytest.approx(trained.step_s)


@pytest.mark.parametrize(("largest", "mapped"), [(1 << 25, 0), (1 << 10, 3)])
def test_results_too_large_for_the_heap_are_mapped_anew_in_each_step(monkeypatch, largest, mapped):
    def step(x: torch.Tensor) -> torch.Tensor:  # three results of 4096 bytes
        a, b = x + 1, x + 2
        return (a * b).sum()

    from tpshard.parallelism import Mesh, partition

    program = partition(step, [torch.ones(1024)], Mesh({"x": 1}))
    program = replace(program, inputs=tuple(replace(port, kind="parameter") for port in program.inputs))
    monkeypatch.setattr(pricing, "MAPPED_BYTES", largest)
    boxes = {n: replace(device("cpu"), cpu=Cpu(cores=2, growth=growth)) for n, growth in ((1, 1e3), (2, 1e3), (0, 0.0))}
    times = {n: price_parts([StepPart("", program, n, compiled="none")], box, 1).fixed_s for n, box in boxes.items()}
    assert times == {1: pytest.approx(mapped * 4096 / 1e3), 2: pytest.approx(2 * times[1]), 0: 0.0}


def test_stages_on_fewer_cores_have_a_cores_speed_for_themselves():
    box = replace(
        device("cpu"),
        cpu=Cpu(
            cores=2, view_s=1e-6, crowds={1: Crowd(), 2: Crowd(compute=0.9), 4: Crowd(0.8, overhead=2.0, skew_s=1)}
        ),
    )
    four, own, two = box.shared_by(4), box.with_own_core(4), box.shared_by(2)
    assert box.with_own_core(2) == two
    assert (own.rates, own.overhead, own.cpu.view_s) == (two.rates, two.overhead, two.cpu.view_s)
    assert (own.inside, own.memory_bytes, own.cpu.skew_s) == (four.inside, four.memory_bytes, four.cpu.skew_s)
    assert own.rates["fp32"] > 2 * four.rates["fp32"]


def test_plans_for_serving_hold_a_cache(report):
    recipe = loads(RECIPE, ["serve.mesh.tp=2", "serve.requests=4"])
    prefill, decode = planner.report(recipe, "", "prefill"), planner.report(recipe, "", "decode")
    # keys and values, half of the 2 heads of 8, fp32, 4 sequences of 16 and block 0
    assert decode.pricing.static_bytes["cache"] >= 2 * 1 * 8 * 4 * (4 * 16)
    assert prefill.job.tokens == 16 and decode.job.tokens == 4
    assert {line.kind for line in decode.lines} == {"all_reduce", "all_gather"}


def test_a_servers_plan_names_what_every_device_computes():
    even, odd = (
        planner.report(loads(RECIPE, ["serve.mesh.tp=2", *more]), "", "decode") for more in ([], ["model.vocab=2047"])
    )
    places = {row["where"] for row in even.losses}
    assert {"layers.*.attention_norm", "layers.*.mlp_norm", "norm"} <= places
    assert not any(re.search(r"_\d+$", place) for place in places)
    worst = odd.losses[0]
    assert (worst["op"], worst["where"], worst["efficiency"]) == ("fixed_rows_linear", "output", 0.5)
    assert not any("vocabulary" in line for line in even.warnings)
    assert any("the whole vocabulary: tp 2 does not divide 2,047" in line for line in odd.warnings)
