"""The partitioned step: equal to the plain model, the same bits on every rank, nothing sent in vain."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tpshard.models import build
from tpshard.models.config import ModelConfig
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.simulate import local_arguments, run_lockstep
from tpshard.programs.padding import padded
from tpshard.programs.serving import make_pools, step_program
from tpshard.serve.check import need
from tpshard.serve.job import Weights
from tpshard.serve.padding import pad

LLAMA = ModelConfig(
    family="llama", layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48, vocab=64, max_seq=128, seq_len=64,
    dtype="fp32",
)  # fmt: skip
GRANITE = replace(LLAMA, family="granite", kv_heads=1, attention_bias=True, mlp_bias=True, tie_embeddings=True)
CASES = {
    "llama, tp 2": (LLAMA, 2),
    "llama, KV heads replicated": (LLAMA, 4),
    "tied, vocab not divided": (replace(LLAMA, vocab=63, tie_embeddings=True), 2),
    "granite, one KV head": (GRANITE, 2),
    "mistral, a window": (replace(LLAMA, family="mistral", window=3), 2),
    "qwen2, a window in one layer": (replace(LLAMA, family="qwen2", window=2, full_layers=(0,)), 4),
    "qwen3, KV heads replicated": (replace(LLAMA, family="qwen3", attention_bias=True), 4),
    "llama, MLP not divided": (replace(LLAMA, mlp=50, mlp_bias=True), 4),
    "granite, MLP not divided": (replace(GRANITE, mlp=49), 2),
}


def program_inputs(config: ModelConfig, parameters: list[torch.Tensor], rows: int) -> list[Any]:
    """A prompt of 5 rows and one of 3, both from the start, in blocks 1 and 2."""
    tokens = torch.randint(0, config.vocab, (1, rows), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[*range(5), *range(3)]])
    sequences = torch.tensor([[0] * 5 + [1] * 3])
    slots = (sequences + 1) * 16 + positions
    tables = torch.zeros(rows + 1, 4, dtype=torch.int64)
    tables[0, 0], tables[1, 0] = 1, 2
    wanted = torch.arange(rows)
    pools = [pool for pair in make_pools(config, 4, 16, torch.float32, "cpu") for pool in pair]
    return [tokens, positions, slots, sequences, tables, wanted, *pools, *parameters]


def parameters_of(config: ModelConfig, model: torch.nn.Module) -> list[torch.Tensor]:
    """Those of `model`, with zeros where `config` is larger."""
    own = {name: p.detach() for name, p in model.named_parameters()}
    block = lambda name, starts, sizes: own[name][tuple(slice(s, s + n) for s, n in zip(starts, sizes))]  # noqa: E731
    weights = pad(Weights(model.config, block), config)  # type: ignore[arg-type]
    return [weights.block(name, (0,) * p.dim(), p.shape) for name, p in build(config).named_parameters()]


@pytest.mark.parametrize("case", CASES)
def test_the_partitioned_step_is_the_model(case: str) -> None:
    config, tp = CASES[case]
    model = build(config, device="cpu", seed=2)
    wide = padded(config, tp)
    assert (wide is config) == ("MLP" not in case)
    program = step_program(build(wide), wide, Mesh({"tp": tp}), rows=8, wanted=8, blocks=4, block_size=16)
    inputs = program_inputs(config, parameters_of(wide, model), 8)
    results = run_lockstep(program, [local_arguments(program, rank, inputs) for rank in range(tp)])
    for (other,) in results[1:]:
        assert torch.equal(results[0][0], other)
    with torch.no_grad():
        expected = torch.cat([model(inputs[0][:, :5])[0], model(inputs[0][:, 5:])[0]])
    torch.testing.assert_close(results[0][0], expected, rtol=1e-4, atol=1e-4)
    split = config.vocab % tp == 0
    counted = Counter(c.kind for c in program.collectives)
    assert counted == {"all_reduce": 2 * config.layers + split} | ({"all_gather": 1} if split else {})


def test_tp_that_fits_no_heads_is_refused_with_what_fits() -> None:
    with pytest.raises(ValueError, match=r"tp 3 does not fit 4 heads and 2 KV heads; these do: 1, 2, 4$"):
        step_program(build(LLAMA), LLAMA, Mesh({"tp": 3}), rows=8, wanted=8, blocks=4, block_size=16)


def test_what_it_needs_is_known_before_anything_is_loaded() -> None:
    one, two = (need(LLAMA, tp, "bf16", 100, "cpu", True) for tp in (1, 2))
    assert one.parameter_bytes == 2 * LLAMA.count
    assert one.cache_bytes == 2 * LLAMA.layers * 101 * 16 * 2 * 8 * 2 == 2 * two.cache_bytes
    assert not one.collectives and one.cache_tokens == 1600
    assert sum(c["count"] for c in two.collectives) == 2 * LLAMA.layers + 2
    assert {c["bytes"] for c in two.collectives if c["kind"] == "all_reduce"} == {LLAMA.width * 2}
    assert np.isclose(two.parameter_bytes, one.parameter_bytes / 2, rtol=0.1)
    assert "5 all_reduce over tp" in str(two)


def test_a_device_holds_its_part_of_an_mlp_that_tp_does_not_divide() -> None:
    uneven = replace(LLAMA, mlp=1001)
    needs = {tp: need(uneven, tp, "fp32", 100, "cpu", True) for tp in (1, 2, 4)}
    evenly = {tp: need(replace(LLAMA, mlp=1024), tp, "fp32", 100, "cpu", True) for tp in (2, 4)}
    assert {tp: needs[tp].parameter_bytes for tp in (2, 4)} == {tp: evenly[tp].parameter_bytes for tp in (2, 4)}
    assert needs[4].parameter_bytes < 0.27 * needs[1].parameter_bytes
    assert needs[4].collectives == evenly[4].collectives
    assert "MLP padded from 1,001 to 1,024 columns, equal parts for tp 4" in str(needs[4])
    assert not needs[1].padding and not evenly[4].padding and "padded" not in str(needs[1])
