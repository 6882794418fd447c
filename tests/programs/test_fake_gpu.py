"""Every tensor of every program is on the GPU, shown by running the programs on fake CUDA tensors."""

from __future__ import annotations

from pathlib import Path

import architectures
import pytest
import torch
import tpshard
from fake_gpu import run_on_fake_gpu
from torch._higher_order_ops import scan, while_loop
from tpshard.models.adapters.slotted_model import Slots
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.program import programs_in
from tpshard.parallelism.runtime import execute
from tpshard.parallelism.sharding import Layout
from tpshard.programs.server.captured_steps import can_capture
from tpshard.programs.server.sampling_programs import sampling_program, select_by_kernel
from tpshard.programs.server.serve_setting import ServeSetting
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.server.serving import ServingPrograms, build_serving
from tpshard.programs.server.token_choice import drawn, likeliest, nucleus, scores, selected
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import load, loads

CASES = {
    "padded": ("tiny", "mesh={tp: 3}", "sharding.on_uneven=pad", "model.layers=1"),
    "quickstart": ("quickstart", "model.layers=1"),
    "muon": ("quickstart", "model.layers=2", "optimizer.name=muon", "mesh={tp: 2}"),
    "lion": ("tiny", "model.layers=1", "optimizer.name=lion"),
    "sequence": ("quickstart", "model.layers=1", "sharding.rules.seq=tp"),
    "mirrored": (
        "tiny", "mesh={cp: 2}", "sharding={rules: {seq: cp}}", "model.layers=1", "model.seq_len=4096", "model.heads=3",
        "model.kv_heads=3", "model.max_seq=4096",
    ),
    "experts": ("moe", "model.layers=1"),
    "slots": ("moe", "model.layers=1", "mesh={fsdp: 2, ep: 4}", "model.capacity=null",
              "sharding.dropless.form=all_to_all"),
    "halos": ("unet",),
    "conformer": ("conformer", "model.args.layers=1"),
    "encoder": ("encoder", "model.args.layers=1"),
    "uneven": ("encoder", "model.args.layers=1", "mesh={fsdp: 2, tp: 3}", "sharding.on_uneven=pad"),
    "1f1b": ("tiny", "mesh={pp: 2, fsdp: 2}", "model.layers=2", "pipeline.schedule=1f1b", "batch.per_device=1"),
    "zero_bubble": ("tiny", "mesh={pp: 2}", "model.layers=2", "pipeline.schedule=zero_bubble"),
    "vectorized": ("tiny", "mesh={pp: 2}", "model.layers=2", "pipeline.schedule=gpipe"),
    "llama3-8b": ("llama3-8b", "model.layers=1"),
    "granite-20b": ("granite-20b", "model.layers=1"),
    "dense-2d": ("dense-2d", "model.layers=1"),
    "fp8": ("llama3-8b", "model.layers=1", "model.dtype=fp8"),
    "lora": ("llama3-8b-lora", "model.layers=1"),
    "qlora": ("llama3-70b-qlora", "model.layers=1"),
    "dora": ("finetune-lora", "model.layers=1", "adapters.lora.dora=true", "mesh={tp: 2}"),
}  # fmt: skip
"""Each shipped recipe of another kind, with few layers, and ways to shard that no shipped recipe has."""


@pytest.mark.parametrize("case", CASES)
def test_a_training_program_has_all_tensors_on_its_device(case: str) -> None:
    name, *overrides = CASES[case]
    for program in training.build(Setting.of(load(name, overrides))).programs.values():
        run_on_fake_gpu(program, program.mesh.ranks - 1)


def test_a_long_sequence_on_gpus_is_planned() -> None:
    """Its devices have equally much attention to compute, and what they send for it is asked for."""
    name, *overrides = CASES["mirrored"]
    gpus = "cluster={device: h100-sxm-80g, nodes: 1, devices_per_node: 2}", "model.dtype=bf16", "model.head_dim=128"
    longer = "model.seq_len=131072", "model.max_seq=131072", "batch={global_sequences: 1, per_device: 1}"
    plan = tpshard.plan(load(name, [*overrides, *gpus, *longer]))
    assert plan.flop_efficiency == pytest.approx(1, abs=0.01)
    sent = [c for c in plan.to_json()["collectives"] if c["of"] == "activation"]
    assert "permute" in {c["kind"] for c in sent} and all(c["asked"] for c in sent)


SERVED = {
    "dense": ("tiny", "model.layers=1", "serve.mesh.tp=2"),
    "padded": ("tiny", "model.layers=1", "serve.mesh.tp=2", "model.mlp=250"),
    "quantized": ("tiny", "model.layers=1", "serve.mesh.tp=2", "serve.checkpoint=not-there", "quantize.bits=4"),
    "experts": ("moe", "model.layers=1", "serve.mesh={ep: 2}"),
    "quantized experts": ("moe", "model.layers=1", "serve.checkpoint=not-there", "quantize.bits=4"),
}


@pytest.mark.parametrize("case", SERVED)
def test_a_step_of_a_server_has_all_tensors_on_its_device(case: str) -> None:
    recipe = load(SERVED[case][0], SERVED[case][1:])
    run_steps(build_serving(ServeSetting.of(recipe, model_to_serve(recipe, "gpu"), "gpu")))


def run_steps(programs: ServingPrograms) -> None:
    for program in programs.by_size.values():
        cache = {port.name: 4 for port in program.inputs if port.kind == "cache"}
        run_on_fake_gpu(program, program.mesh.ranks - 1, cache | {"tables": 3})


FAMILIES = {
    "gemma2": "hf", "gpt_oss": "hf", "mamba": "hf", "qwen2": "hf", "deepseek_v32": "transformers",
    "qwen3_next": "transformers", "bert": "transformers",
}  # fmt: skip
"""Softcaps and windows, sinks, states, biases of joined products, selected keys, the delta rule, and attention to all
tokens, whose logsumexps a ring adds up."""


@pytest.mark.parametrize("name", FAMILIES)
def test_programs_of_a_family_have_all_tensors_on_their_device(name: str, tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path, name)
    recipe = loads(
        f"name: family\ncluster: {{device: cpu, devices_per_node: 2}}\nmesh: {{cp: 2}}\nserve: {{mesh: {{tp: 1}}}}\n"
        f"model: {{{FAMILIES[name]}: {folder}, seq_len: 12, dtype: bf16}}\nbatch: {{global_sequences: 8}}\n"
        "sharding: {rules: {seq: cp}}"
    )
    for program in training.build(Setting.of(recipe)).programs.values():
        run_on_fake_gpu(program, 1)
    if name != "bert":  # which does not write text
        run_steps(build_serving(ServeSetting.of(recipe, model_to_serve(recipe, "gpu"), "gpu")))


@pytest.mark.parametrize("names", ["Vision:Images", "Translator:Reversed"])
def test_programs_of_images_and_of_two_texts_have_all_tensors_on_their_device(names: str) -> None:
    """With the evaluation that a quantized folder of theirs is read for, and cross-attention."""
    module, task = names.split(":")
    recipe = loads(
        "name: own\ncluster: {device: cpu, devices_per_node: 4}\nmesh: {fsdp: 2, tp: 2}\n"
        f"task: 'task_models:{task}'\nmodel: {{module: 'task_models:{module}', seq_len: 12, dtype: bf16}}\n"
        "batch: {global_sequences: 8}\nsharding: {rules: {batch: [dp, fsdp], heads: tp, mlp: tp}}"
    )
    programs = training.build(Setting.of(recipe)).programs
    assert "evaluation of stage 0" in programs
    for program in programs.values():
        run_on_fake_gpu(program, program.mesh.ranks - 1)


def test_a_step_with_adapters_is_captured_and_has_all_tensors_on_its_device() -> None:
    recipe = load("tiny", ["model.layers=1", "serve.mesh.tp=2"])
    served = model_to_serve(recipe, "gpu")
    slots = Slots(2, 4, tuple(one.path for one in served.spec.adaptable() if not one.head and not one.table))
    programs = build_serving(ServeSetting.of(recipe, served, "gpu", slots))
    assert programs.slotted and all(can_capture(program) for program in programs.by_size.values())
    run_steps(programs)


def test_every_body_of_control_flow_has_all_tensors_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def round(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            carry = torch.tanh(carry @ w + row)
            return carry, carry * torch.arange(8, dtype=carry.dtype)

        last, rows = scan(round, x[0] * 0, x)
        halved = while_loop(lambda y, n: y.abs().sum() > n, lambda y, n: (y / 2, n + 1), (last, torch.ones(())))[0]
        return rows + torch.cond(halved.sum() > 0, lambda y: y + torch.arange(8), lambda y: y.cumsum(-1), (halved,))

    x, w = torch.empty(6, 4, 8), torch.empty(8, 8)
    program = partition(step, [x, w], Mesh({"x": 2}), in_shardings=[(None, "x", None), (None, None)])
    run_on_fake_gpu(program, 1)
    inside = [node for flow in program.graph.nodes for body in programs_in(flow) for node in body.graph.nodes]
    for made in (node for node in inside if "device" in node.kwargs):
        made.kwargs = {key: value for key, value in made.kwargs.items() if key != "device"}
    monkeypatch.setattr(execute, "_creates", lambda node: False)  # what a body makes stays on the CPU
    with pytest.raises(AssertionError, match="is on cpu"):
        run_on_fake_gpu(program, 1)


def test_what_chooses_tokens_has_all_tensors_on_its_device() -> None:
    mesh = Mesh({"tp": 4})
    for choice, count in ((likeliest, None), (drawn, None), (nucleus, None), (selected, None), (scores, 5)):
        program = sampling_program(choice, mesh, Layout(((), (mesh.axis("tp"),))), 2, 2048, count)
        run_on_fake_gpu(select_by_kernel(program), 3)


def test_a_constant_on_the_cpu_is_found() -> None:
    program = partition(lambda x: x + 1, [torch.empty(4, 2)], Mesh({"x": 2}), in_shardings=[("x",)])
    run_on_fake_gpu(program, 0)
    (add,) = (node for node in program.graph.nodes if node.target is torch.ops.aten.add.Tensor)
    with program.graph.inserting_before(add):
        constant = program.graph.call_function(torch.ops.aten.ones_like.default, (add.args[0],), {"device": "cpu"})
        constant.meta.update(add.meta)
        on_cpu = program.graph.call_function(torch.ops.aten.to.device, (constant, "cpu", torch.float32))
        on_cpu.meta.update(add.meta)
    add.args = (add.args[0], on_cpu)
    with pytest.raises(AssertionError, match="is on cpu"):
        run_on_fake_gpu(program, 0)
