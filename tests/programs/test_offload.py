"""Activations that wait in the host's memory: what a device holds, and when copies are made."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tpshard.devices.read import device
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.parallelism.pricing.fusion import kernels
from tpshard.parallelism.pricing.liveness import Memory, liveness, pinned_bytes
from tpshard.parallelism.pricing.timeline import price
from tpshard.parallelism.program import Program, info
from tpshard.parallelism.transfer import COPIES, copied, fetch, offload
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

LAYERS = 5
RECIPE = f"""
name: away
cluster: {{device: h100-sxm-80g, devices_per_node: 2}}
mesh: {{fsdp: 2}}
model: {{preset: tiny, layers: {LAYERS}, width: 64, heads: 4, kv_heads: 2, head_dim: 16, mlp: 96, vocab: 32,
  seq_len: 64, dtype: bf16}}
batch: {{global_sequences: 2}}
fsdp: {{bucket: wrap}}
"""
INPUT = 64 * 64 * 2
"""Bytes of a layer's input on a device."""


@cache
def program(*overrides: str) -> Program:
    return training.build(Setting.of(loads(RECIPE, overrides))).micro


def memory(of: Program, name: str = "h100-sxm-80g") -> Memory:
    return liveness(of, kernels(of, compiled="none"), device=device(name))


@pytest.mark.parametrize("remat", ["selective", "none"])
def test_a_gpu_holds_what_few_layers_save(remat: str) -> None:
    """Of four layers of five nothing stays at the end of the forward pass but what is on its way."""
    held = {
        where: max(memory(program(f"remat={remat}", f"offload={where}")).by_category["activations"])
        for where in ("none", "activations")
    }
    assert held["activations"] < 0.75 * held["none"]


def test_the_host_holds_each_layer_s_input_in_powers_of_two() -> None:
    """With full recomputation it is all that a layer saves; the last one's stays on the device."""
    assert pinned_bytes(INPUT) == INPUT and [pinned_bytes(n) for n in (3, 4, 5)] == [4, 4, 8]
    assert memory(program("remat=full", "offload=activations")).host_bytes == (LAYERS - 1) * INPUT
    assert memory(program("remat=full", "offload={first: 2}")).host_bytes == 2 * INPUT
    assert memory(program("remat=full")).host_bytes == 0
    on_cpu = memory(program("remat=full", "offload=activations"), "cpu")
    assert on_cpu.host_bytes == 0 and on_cpu.peak_bytes >= memory(program("remat=full"), "cpu").peak_bytes


def test_copies_run_while_a_layer_is_computed() -> None:
    """Between the issue of a copy and the wait for it a layer is computed, forward or backward."""
    nodes = program("remat=full", "offload=activations").nodes
    at = {node: i for i, node in enumerate(nodes)}
    issues = [node for node in nodes if node.target in COPIES]
    assert [node.target for node in issues] == [offload] * (LAYERS - 1) + [fetch] * (LAYERS - 1)
    for node in issues:
        (wait,) = (user for user in node.users if user.target is copied)
        between = {info(other).place.layer for other in nodes[at[node] : at[wait]] if info(other).flops}
        assert len(between - {None}) >= 1, node


def test_slow_buses_are_waited_for() -> None:
    one, gpu = program("remat=none", "offload=activations"), device("h100-sxm-80g")
    fast, slow = (replace(gpu, bus=replace(gpu.bus, bandwidth=rate)) for rate in (1e12, 1e7))
    runs = ((program("remat=none"), fast), (one, fast), (one, slow))
    plain, hidden, exposed = (price(each, on, 2, compiled="none").run() for each, on in runs)
    assert hidden.exposed_s == pytest.approx(plain.exposed_s) and hidden.comm_s == pytest.approx(plain.comm_s)
    assert exposed.exposed_s > hidden.exposed_s + 1e-3 and exposed.comm_s < exposed.exposed_s
    assert {"to host", "from host"} <= {event.lane for event in exposed.events}


def test_a_pipeline_s_stages_keep_theirs() -> None:
    with pytest.raises(Mistakes, match="`offload` does not suit a pipeline"):
        loads(RECIPE, ["offload=activations", "pipeline={schedule: 1f1b}", "mesh={pp: 2, fsdp: 1}"])
