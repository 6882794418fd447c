"""A plan for a server with quantized weights prices what its ranks run, in every layout."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import pytest
import torch
from servers import folder_runner, job_of, programs_of
from torch.utils._python_dispatch import TorchDispatchMode
from tpshard.cli.main import run as tpshard
from tpshard.cli.shared.serve_worker import prepare
from tpshard.devices.read import device
from tpshard.kernels.quantized.gptq_solver import Order, Settings
from tpshard.models import build, to_hf
from tpshard.models.families.config import ModelConfig
from tpshard.models.family_model import FamilyModel
from tpshard.models.folders.hf_config import folder_config
from tpshard.parallelism.pricing.flow import info_of, op_name
from tpshard.parallelism.pricing.timeline import price
from tpshard.parallelism.program import Program
from tpshard.parallelism.resharding.exchange import cpu_collective
from tpshard.parallelism.runtime.context import Context
from tpshard.plan import planner
from tpshard.plan.report import screen
from tpshard.plan.report.planned import Planned
from tpshard.plan.search import search
from tpshard.plan.search.edits import edits as edits_of
from tpshard.plan.server import server_steps
from tpshard.programs.server.act_order import LAYOUTS
from tpshard.programs.server.serve_setting import Size
from tpshard.programs.setting import cluster
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads
from tpshard.serve.api.need import need
from tpshard.serve.engine.job import Job
from tpshard.serve.engine.runner import ProgramRunner
from tpshard.serve.engine.step import StepInput
from tpshard.serve.quantizing.quantize_layers import Quantizer
from tpshard.serve.quantizing.task_rows import text_rows
from tpshard.serve.quantizing.write_quantized import write_quantized

CONFIG = ModelConfig(
    family="llama", layers=1, width=64, heads=4, kv_heads=2, head_dim=64, mlp=128, vocab=128, max_seq=64, seq_len=16,
    dtype="fp32",
)  # fmt: skip
ROWS = 8
CPU = device("cpu")


def decode(served: Recipe) -> Planned:
    """The plan of a step of decoding from that step's program alone."""
    return server_steps.planned(served, "decode", whole=False)


def quantize(out: Path, order: Order, config: ModelConfig = CONFIG) -> Path:
    model = build(config, device="cpu", seed=1)
    parameters = dict(model.named_parameters())
    tokens = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(0))
    read = lambda name: parameters[name].detach() * (1 if "norm" in name else 3)  # noqa: E731
    write_quantized(
        Quantizer(FamilyModel(config), read, text_rows(tokens, tokens), None, Settings(group_size=32), order), out
    )
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("gptq")
    orders: tuple[Order, ...] = ("head_local", "global")
    return {order: quantize(base / order, order) for order in orders}


def changes(checkpoint: Path | str, layout: str) -> list[str]:
    return [
        f"serve.checkpoint={checkpoint}", f"serve.layout={layout}", "serve.mesh.tp=2", f"serve.requests={ROWS}",
        f"serve.step_tokens={ROWS}",
    ]  # fmt: skip


def recipe(checkpoint: Path | str, layout: str, *more: str) -> Recipe:
    return loads("name: small\nmodel: {preset: tiny, seq_len: 16}\n", [*changes(checkpoint, layout), *more])


class Counting(TorchDispatchMode):
    """Counts collectives as they are dispatched: (kind, bytes of the buffer) -> times."""

    KINDS = {"all_gather_into_tensor": "all_gather", "all_to_all_single": "all_to_all"}

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and func.overloadpacket.__name__ != "wait_tensor":
            name = func.overloadpacket.__name__.removesuffix("_out")  # as one is sent that is handed its memory
            kind = self.KINDS.get(name, name)
            buffer = out if kind == "all_gather" else args[0]
            self.counts[kind, buffer.numel() * buffer.itemsize] += 1
        return out


def as_sent(program: Program) -> Counter[tuple[str, int]]:
    """(kind, bytes handed over) -> times, on a CPU."""
    return Counter(cpu_collective(c.kind, c.bytes, c.size) for c in program.collectives)


def prompt() -> StepInput:
    rows = np.arange(ROWS)
    return StepInput(rows + 3, rows, rows + 16, rows * 0, np.array([[1]]), rows)


def serve_on_rank(context: Context, jobs: list[bytes]) -> list[tuple[dict[tuple[str, int], int], int, list[Any]]]:
    """For each job: the dispatched collectives of a step, the bytes of weights, and the rank's part of the logits."""
    done = []
    for raw in jobs:
        job = Job.decode(raw)
        programs, weights = prepare(job)
        assert programs.listed == list(job.programs)
        runner = ProgramRunner(context, programs, weights, job.blocks)
        counting = Counting()
        with counting:
            logits = runner.logits(prompt())
        held = 0
        for port, value in zip(programs.by_size[Size(ROWS)].inputs, runner._given[Size(ROWS)]):
            if port.kind == "parameter":
                # an opaque one does not say what it takes: as many elements as what was packed
                plain = isinstance(value, torch.Tensor)
                held += value.numel() * value.itemsize if plain else value.nbytes
        done.append((dict(counting.counts), held, logits.tolist()))
    return done


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_every_layout_sends_on_real_ranks_what_is_planned(dtype: str, pool: Any, folders: dict[str, Path]) -> None:
    cases = [*(("head_local", layout) for layout in LAYOUTS), ("global", "tp_aware")]
    recipes = {(order, layout): recipe(folders[order], layout, f"serve.dtype={dtype}") for order, layout in cases}
    plans = {key: planner.planned(one, "", "decode") for key, one in recipes.items()}
    built = [
        programs_of(folders[order], *changes(folders[order], layout), f"serve.dtype={dtype}") for order, layout in cases
    ]
    jobs = [Job.of(programs, str(folders[order]), 256) for programs, (order, _) in zip(built, cases)]
    results = pool.run(serve_on_rank, [job.encode() for job in jobs], world=2, mesh={"tp": 2})
    expected = torch.cat([torch.tensor(rank[0][2]) for rank in results], 1)
    for i, ((order, layout), plan) in enumerate(plans.items()):
        program, report = plan.program, plan.report
        assert report.to_json()["programs"] == list(jobs[i].programs)
        rows = next(port.shape[-1] for port in program.inputs if port.name == "tokens")
        assert {one["rows"]: one["fingerprint"] for one in jobs[i].programs}[rows] == program.fingerprint
        planned = Counter((c.kind, c.bytes) for c in program.collectives)
        for rank in results:
            sent, held, _ = rank[i]
            assert sent == as_sent(program)
            assert held == report.pricing.static_bytes["parameters"]
        if order == "head_local":
            close, logits = (
                1e-5 if dtype == "fp32" else 3e-2,
                torch.cat([torch.tensor(rank[i][2]) for rank in results], 1),
            )
            assert (logits - expected).norm() <= close * expected.norm()
        # an all-reduce for attention and one for the MLP of each layer, and one for the embedding
        assert sum(n for (kind, _), n in planned.items() if kind == "all_reduce") == 2 * CONFIG.layers + 1
        gathers = sum(n for (kind, _), n in planned.items() if kind == "all_gather")
        assert gathers == (2 * CONFIG.layers if layout == "naive" else 0)
        whole = need(built[i], 1 << 30)
        assert sum(c["count"] for c in whole.collectives) == sum(line.count for line in plan.pricing.lines())
        assert whole.as_json()["memory"]["parameters"] == report.pricing.static_bytes["parameters"]


def test_an_mlp_that_tp_does_not_divide_is_served_as_planned(pool: Any, tmp_path: Path, capsys: Any) -> None:
    groups = quantize(tmp_path / "groups", "head_local", replace(CONFIG, layers=1, mlp=7 * 32))
    to_hf(build(replace(CONFIG, layers=1, mlp=97), device="cpu", seed=1), dense := tmp_path / "dense")
    cases = [(groups, "naive", "224 to 256"), (dense, "tp_aware", "97 to 128")]
    plans = [decode(recipe(folder, layout)) for folder, layout, _ in cases]
    jobs = [job_of(folder, *changes(folder, layout)) for folder, layout, _ in cases]
    results = pool.run(serve_on_rank, [job.encode() for job in jobs], world=2, mesh={"tp": 2})
    for i, ((folder, layout, wider), plan) in enumerate(zip(cases, plans)):
        config = folder_config(folder)
        expected = folder_runner(folder, *changes(folder, layout), "serve.mesh.tp=1").logits(prompt())
        program, report = plan.program, plan.report
        counted = Counter(c.kind for c in program.collectives)
        assert counted == Counter({"all_reduce": 2 + 1, "all_gather": 2 if layout == "naive" else 0})
        for sent, held, _ in (rank[i] for rank in results):
            assert sent == as_sent(program)
            assert held == report.pricing.static_bytes["parameters"]
        logits = torch.cat([torch.tensor(rank[i][2]) for rank in results], 1)
        assert (logits - expected).norm() <= 1e-5 * expected.norm()
        output = f"MLP padded from {wider} columns, equal parts for tp 2"
        assert report.job.params == config.count
        assert f"warning: {output}" in screen.screen(report)
        capsys.readouterr()
        assert tpshard(["serve", "tiny", "--check", *changes(folder, layout), "cluster.device=cpu"]) == 0
        assert f"  {output}\n" in capsys.readouterr().out
    # codes, scales and shifts of 4 of the 7 groups, and not of all of them, for each of 64 outputs
    coded = decode(recipe(groups, "tp_aware", "serve.dtype=bf16"))
    (port,) = [p for p in coded.program.inputs if p.name == "layers.0.mlp.down.weight"]
    assert port.local_bytes == 64 * (4 * 32 // 2 + 4 * 4)


def test_columns_that_pad_an_mlp_are_no_useful_work(tmp_path: Path) -> None:
    to_hf(build(replace(CONFIG, mlp=97, mlp_bias=True), device="cpu", seed=1), folder := tmp_path / "odd")
    whole, padded = (decode(recipe(folder, "tp_aware", f"serve.mesh.tp={tp}")) for tp in (1, 2))

    def work(plan: Planned) -> list[tuple[str, str, int, int]]:
        infos = [(node, info_of(node)) for node in plan.program.graph.nodes]
        return [
            (facts.module, op_name(node), facts.flops, facts.global_flops)
            for node, facts in infos if ".mlp" in facts.module and "norm" not in facts.module and facts.flops
        ]  # fmt: skip

    expected, actual = work(whole), work(padded)
    assert len(actual) == 6 * CONFIG.layers  # two products and their biases, a gate and what it multiplies
    for (module, op, useful, _), (same_module, same_op, computed, same_useful) in zip(expected, actual, strict=True):
        assert (module, op, useful) == (same_module, same_op, same_useful)
        if (module[-4:], op) != ("down", "add"):
            assert 2 * computed * 97 == useful * 128
    losses = {(row["op"], row["where"]): row["efficiency"] for row in padded.report.losses}
    assert losses["fixed_rows_linear", "layers.*.mlp.gate"] == pytest.approx(97 / 128)


def test_a_plan_says_what_gathers_and_why(folders: dict[str, Path]) -> None:
    naive, aware, local = (decode(recipe(folders["head_local"], layout)).report for layout in
                           ("naive", "tp_aware", "local_sort"))  # fmt: skip
    assert not aware.reshards and not local.reshards
    rows = {row["reason"].partition(":")[0]: (row["kind"], row["count"], row["bytes"]) for row in naive.reshards}
    # activations of 8 rows in fp32: of all heads, and of the whole MLP
    assert rows == {
        "the act-order of layers.*.attention.wo mixes shards": ("all_gather", 1, ROWS * 4 * 64 * 4),
        "the act-order of layers.*.mlp.down mixes shards": ("all_gather", 1, ROWS * 128 * 4),
    }
    shown = screen.screen(naive)
    assert "all_gather over tp, 8.00 KiB: the act-order of layers.*.attention.wo mixes shards" in shown
    assert "weights 4 bits in groups of 32, 7 of 7 linears act-ordered, layout naive" in shown
    assert "RESHARDS" not in screen.screen(aware)
    assert naive.pricing.step_s > aware.pricing.step_s


def test_a_folder_that_is_not_there_is_planned_as_it_will_be_written(
    folders: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    dims = ["layers=1", "width=64", "heads=4", "kv_heads=2", "head_dim=64", "mlp=128", "vocab=128", "max_seq=64"]
    own = [f"model.{d}" for d in dims]
    cases = [(folders["head_local"], layout, "head_local", 128) for layout in LAYOUTS]
    cases.append((folders["global"], "tp_aware", "global", 128))
    for mlp in (7 * 32, 112):  # groups that two ranks do not divide; an MLP that no GPTQ folder holds quantized
        folder = quantize(tmp_path / f"{mlp}", "head_local", replace(CONFIG, mlp=mlp))
        cases.append((folder, "tp_aware", "head_local", mlp))
    for folder, layout, order, mlp in cases:
        quantized_plan = decode(recipe(folder, layout)).report
        expected = ["quantize.group_size=32", f"quantize.order={order}", f"model.mlp={mlp}"]
        planned = decode(recipe("not-yet", layout, *own, *expected)).report
        assert any("not-yet does not exist yet" in warning for warning in planned.warnings)
        assert planned.fingerprint == quantized_plan.fingerprint
        assert planned.pricing.static_bytes == quantized_plan.pricing.static_bytes
    dense = decode(recipe("latest", "naive", *own)).report
    assert not dense.reshards and not dense.job.quantized
    broken = folders["global"].parent / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    command = ["plan", "tiny", "--for", "decode", "--dry-run", f"serve.checkpoint={broken}", "serve.mesh.tp=1"]
    assert tpshard(command) == 7
    assert "cannot be read" in capsys.readouterr().err


def test_a_run_that_is_served_is_planned_as_its_newest_checkpoint(tmp_path: Path, capsys: Any) -> None:
    """Not as the model of the recipe that names it."""
    dtypes = {1: "float32", 2: "bfloat16"}
    for step, dtype in dtypes.items():
        checkpoint = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        saved = replace(CONFIG, layers=step)
        tensors = {name: {"dtype": dtype} for name in ("optimizer/x", "norm.weight")}
        manifest = {"meta": {"model": FamilyModel(saved).to_json()}, "tensors": tensors}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    one = ["plan", "llama3-1b", "--for", "decode", "--json", "--no-cache", "serve.mesh.tp=1"]
    for place, layers, width in (("run", 2, 2), ("run/checkpoints/step-000001", 1, 4)):
        assert tpshard([*one, f"serve.checkpoint={tmp_path / place}"]) == 0
        plan = json.loads(capsys.readouterr().out)
        count = sum(map(math.prod, replace(CONFIG, layers=layers).shapes.values()))
        held = plan["memory"]["static_bytes"]["parameters"]
        assert (plan["params"], held, plan["batch"]["seq_len"]) == (count, count * width, 64)
    assert tpshard([*one, f"serve.checkpoint={tmp_path}"]) == 7
    assert tpshard([*one, f"serve.checkpoint={tmp_path / 'gone'}"]) == 0
    assert "gone is not on this machine: planned as the recipe's model" in capsys.readouterr().out


@pytest.mark.parametrize(("device", "held"), [("h100-sxm-80g", 128 // 2 + 4 * 2), ("cpu", 128 // 2 + 4 * 4)])
def test_four_bits_are_planned_as_four_bits(device: str, held: int, folders: dict[str, Path]) -> None:
    """An output of `down` has codes, a scale per 32 inputs, and on a CPU in bf16 also a shift."""
    served = recipe(folders["global"], "tp_aware", "serve.mesh.tp=1", f"cluster.device={device}", "serve.dtype=bf16")
    (port,) = [p for p in decode(served).program.inputs
               if p.name == "layers.0.mlp.down.weight"]  # fmt: skip
    assert port.local_bytes == 64 * held


def cached_blocks(*overrides: str) -> Recipe:
    more = ["serve.requests=8", "serve.step_tokens=8", "serve.mesh.tp=2", *overrides]
    return loads("name: small\ncluster: {device: cpu, devices_per_node: 2}\nmodel: {preset: tiny}\n", more)


def with_memory(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe for two devices with a number of bytes each."""
    whole = cluster.device_of

    def device_of(recipe: Recipe) -> Any:
        device, nodes, per_host = whole(recipe)
        return replace(device, memory_bytes=2 * each), nodes, per_host

    monkeypatch.setattr(cluster, "device_of", device_of)


@pytest.mark.parametrize(("overrides", "few"), [([], ""), (["serve.cache_mb=1"], "4 of 8"), (["serve.cache_mb=3"], "")])
def test_a_plan_holds_the_cache_that_the_server_makes(overrides: list[str], few: str, capsys: Any) -> None:
    options = ["serve.requests=8", "serve.step_tokens=8", "serve.mesh.tp=2", "cluster.device=cpu", *overrides]
    assert tpshard(["serve", "tiny", "--check", "--json", *options]) == 0
    held = json.loads(capsys.readouterr().out)["memory"]["cache"]
    for what in ("prefill", "decode"):
        report = planner.report(cached_blocks(*overrides), "", what)
        assert report.pricing.static_bytes["cache"] == report.pricing.worst.at_peak["cache"] == held
        # 16 KiB hold 16 positions of 2 KV heads in 4 layers; a request has 256
        output = [warning for warning in report.warnings if "the cache" in warning]
        assert output == ([f"the cache, 1.00 MiB or 1,024 tokens, holds {few} requests of 256"] if few else [])
        assert not few or f"warning: {output[0]}" in screen.screen(report)


def test_a_plan_limits_the_cache_as_the_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decode(cached_blocks()).report
    with_memory(4 * 2**20, monkeypatch)
    report = decode(cached_blocks()).report  # a quarter is for the cache
    assert report.pricing.static_bytes["cache"] == 2**20 + 2**14
    assert "holds 4 of 8 requests of 256" in report.warnings[0]
    assert report.pricing.useful_flops < whole.pricing.useful_flops  # what is not in the cache is not attended to


def test_a_cache_that_leaves_no_room_is_cut_first(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["model.layers=8", "serve.cache_mb=4"]
    full = decode(cached_blocks(*overrides)).pricing.needed_bytes
    with_memory(full - 2**20, monkeypatch)
    report = decode(cached_blocks(*overrides)).report
    first = edits_of(report, cached_blocks(*overrides))[0]
    assert not report.fits and first.fits
    key, _, value = first.change.partition(": ")
    assert key == "serve.cache_mb" and 1 <= int(value) < 4
    actual = decode(cached_blocks(*overrides, f"{key}={value}")).pricing.needed_bytes
    assert first.needed_bytes == pytest.approx(actual, rel=1e-4)


def test_a_variant_is_priced_with_the_cache_of_all_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(12 * 2**20, monkeypatch)  # room for the requests of two layers and not of eight
    deep = cached_blocks("model.layers=8", "model.vocab=256")
    report = decode(deep).report
    assert "holds 6 of 8" in report.warnings[0]
    assert search.price_variant(deep, "decode").needed_bytes == pytest.approx(report.pricing.needed_bytes, rel=1e-4)


def test_a_prompt_that_is_whole_chunks_is_priced_from_their_program_alone(tmp_path: Path) -> None:
    """lfm2 computes a prompt of 64 tokens in one chunk, so that no other program is needed for its price."""
    folder = architectures.folder(tmp_path, "lfm2")
    recipe = loads(f"model: {{transformers: '{folder}', seq_len: 64}}\nserve: {{requests: 4, dtype: fp32}}\n")
    report = planner.report(recipe, "", "prefill")
    assert search.price_variant(recipe, "prefill").step_s == pytest.approx(report.pricing.step_s, rel=1e-9)


@pytest.mark.parametrize(("dtype", "layout"), [("fp32", "fp32"), ("bf16", "int4")])
def test_products_take_what_the_machine_was_measured_to_take(dtype: str, layout: str, folders: dict[str, Path]) -> None:
    programs = programs_of(folders["global"], "serve.mesh.tp=1", f"serve.dtype={dtype}")
    shapes = [shape for name, shape in programs.shapes.items() if "attention.w" in name or "mlp." in name]
    linears = sum(map(math.prod, shapes))

    def seconds(rows: int, each_s: float) -> float:
        known = {layout: {1: each_s, 8: 3 * each_s}}
        device = replace(CPU, cpu=replace(CPU.cpu, products=known))
        return price(programs.by_size[Size(rows)], device, 1, compiled="none").run().seconds

    for rows, times in ((1, 1), (8, 3)):
        head = programs.vocab * CONFIG.width if dtype == "fp32" else 0  # a head in bf16 is in another layout
        assert seconds(rows, 2e-6) - seconds(rows, 1e-6) == pytest.approx(times * (linears + head) * 1e-6)


def test_a_server_of_several_hosts_is_refused_as_serve_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert tpshard(["plan", "llama3-8b", "--for", "decode", "--dry-run", "serve.mesh.tp=16"]) == 4
    assert "a server runs on one host" in capsys.readouterr().err
