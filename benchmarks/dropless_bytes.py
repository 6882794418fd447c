"""The bytes of dropless experts by all-to-all, as a share of those by gathers, where routing is even.

    python benchmarks/dropless_bytes.py [--record]        a quarter of a minute

One layer on 8 devices that each hold an eighth of the experts and 4,096 tokens. Nothing runs: the bytes are those on
the wire of a device in the programs that would. `least` is the share of devices that have some of a token's experts,
1 - C(n - n/8, k) / C(n, k) for k of n experts: each of these must get the token, and gives one result back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tpshard.parallelism.pricing.timeline import Priced, price
from tpshard.parallelism.program import info
from tpshard.programs.setting.cluster import device_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

from record import Record, parser_of

DEVICES = 8
RECIPE = """
name: mixture
cluster: {device: h100-sxm-80g, nodes: 1, devices_per_node: 8}
mesh: {ep: 8}
model: {preset: tiny-moe, experts: 16, top_k: 2, layers: 1, width: 64, heads: 4, kv_heads: 4, head_dim: 16, mlp: 32,
        vocab: 64, seq_len: 4096, dtype: fp32}
batch: {global_sequences: 8}
compile: blocks
"""
CASES = ((16, 2), (16, 4), (64, 6), (128, 8))
"""Experts, and those of a token."""


def setting(*overrides: str) -> Setting:
    return Setting.of(loads(RECIPE, overrides))


def sent_to_experts(*overrides: str) -> int:
    """Bytes of activations that a device receives over ep in a step with even routing."""
    built = training.build(setting(*overrides))
    device, _, per_host = device_of(built.setting.recipe)
    priced = price(built.stages[0].forward, device, per_host, compiled="none")
    return sum(sum(_over_ep(one)) for one in (priced, *(body for body, _, _ in priced.bodies)))


def _over_ep(priced: Priced) -> Iterator[int]:
    for i, cost in priced.costs.items():
        comm = info(priced.kernels[i].node).comm
        if comm is not None and comm.axes == ("ep",) and comm.of == "activation":
            yield cost.wire_bytes


def least(experts: int, top_k: int) -> float:
    """The share of devices that have some of a token's experts."""
    return 1 - math.comb(experts - experts // DEVICES, top_k) / math.comb(experts, top_k)


def main() -> None:
    options = parser_of(__doc__).parse_args()
    record = Record("dropless_bytes", quiet=options.json)
    for experts, top_k in CASES:
        model = (f"model.experts={experts}", f"model.top_k={top_k}", "model.width=512")
        gather, exchange = (
            sent_to_experts(*model, f"sharding.dropless.form={form}") for form in ("gather", "all_to_all")
        )
        record.rows.append({"experts": experts, "top_k": top_k, "gather": gather, "all_to_all": exchange})
        record.figure(f"{experts}.{top_k}.sent", exchange / gather, "share")
        record.figure(f"{experts}.{top_k}.least", least(experts, top_k), "share")
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
