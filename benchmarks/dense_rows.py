"""The rows of the older published_runs.csv (torchtitan and KempnerForge, dense) as recipes.

Settings that a row does not state are taken from how its source ran. The loss of `tt_2024*` ran eagerly, that of all
others but `kf_*` was compiled apart from the blocks. Of `kf_*` the public code says more than the rows (KempnerForge:
`training/loop.py`, `training/loss.py`, `distributed/tensor_parallel.py`): the loss ran eagerly in the dtype of the
logits, and the loop held these until the next micro-batch had its own; with tensor parallelism every device held the
whole embedding, and norms were sharded over the sequence, which the rows deny. Without asynchronous tensor parallelism
torch waits for each exchange. Nothing is adapted to a row.
"""

from __future__ import annotations

from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads

from published_rows import Missing, PublishedRun, device_of

MODELS = {
    "7B": "preset: llama3-8b",
    "8B": "preset: llama3-8b",
    "llama3-8B": "preset: llama3-8b",
    "13B": "preset: llama3-8b, width: 5120, layers: 40, heads: 40, kv_heads: 8, mlp: 17920",
    "70B": "preset: llama3-70b",
    "405B": "preset: llama3-405b",
}
REMAT = {"none": "none", "full": "full", "sac_op": "[attention, wq, wv, gate, down]", "sac_layer": "{every: 2}"}
FITTED_ON = {
    ("kf_mfu_scaling", "1", "1"), ("kf_mfu_scaling", "1", "2"), ("tt_202412_T1", "8", "1"), ("tt_2024_A100", "64", "1"),
    ("tt_202506_asyncTP", "8", "8"),
}  # fmt: skip
"""(source, fsdp, tp) of the rows to which the shipped constants were fitted; the other rows test them."""


def number(row: dict[str, str], key: str, default: int = 1) -> int:
    return int(float(row.get(key) or default))


def run_of(row: dict[str, str]) -> PublishedRun:
    """The run of a row. Missing."""
    recipe = recipe_of(row)
    return PublishedRun(
        name=f"{row['src']} x{row['gpus']} {row['ac']}",
        recipe=recipe,
        device=device_of(row) or "",
        model=row["model"],
        parallelism="fsdp" + f" tp {row['tp']}" * (row["tp"] != "1"),
        fitted=(row["src"], row["fsdp"], row["tp"]) in FITTED_ON,
        step_s=float(row["step_s"] or 0) or None,
        memory_gib=float(row.get("mem_gib") or 0) or None,
        reserved=row.get("mem_kind") == "reserved_peak",
        compiled="rest" if row["compile"] == "0" and not eager_loss(row) else None,
        held_logits=2 * holds_logits(row),
    )


def recipe_of(row: dict[str, str]) -> Recipe:
    """The recipe of a row. Missing, with all that these rows' reader cannot say."""
    quant = row.get("quant") or "none"
    missing = {key: f"above 1 in {row['src']}" for key in ("pp", "cp", "ep") if number(row, key) > 1}
    missing |= {"model": row["model"]} if row["model"] not in MODELS else {}
    missing |= {"cluster.device": row.get("gpu") or ""} if device_of(row) is None else {}
    missing |= {"model.dtype": quant} if not quant.startswith(("none", "fp8", "float8")) else {}
    if missing:
        raise Missing(missing)
    dtype = "bf16" if quant == "none" else "fp8"
    per_node, gpus = number(row, "gpus_per_node", 8), number(row, "gpus")
    ranks, times, tp = number(row, "dp_rep") * number(row, "fsdp"), number(row, "grad_accum"), number(row, "tp")
    rules, annotate, pins = "", "", []
    if row.get("seq_parallel") == "1" or (tp > 1 and holds_logits(row)):
        rules = "rules: {batch: [dp, fsdp], vocab: tp, heads: tp, mlp: tp, seq_sp: tp}"
        annotate = 'annotate: {"layers.*.residual": [batch, seq_sp, embed]}'
    if tp > 1 and row.get("loss_parallel") != "1":
        pins.append('"logits": [[dp, fsdp], null, null]')
    if tp > 1 and holds_logits(row):
        pins += ['"tok_embed.weight": [null, null]', '"embedded": [[dp, fsdp], null, null]']
    waits = "overlap: false" if tp > 1 and row.get("async_tp") != "1" else ""
    sharding = ", ".join(
        part for part in (waits, rules, annotate, f"pin: {{{', '.join(pins)}}}" if pins else "") if part
    )
    wrap = "[layers.*, [tok_embed, norm, output]]" if holds_logits(row) else "[layers.*, [tok_embed], [norm, output]]"
    reduce = "last" if row.get("accumulate_unsharded") == "1" and times > 1 else "each"
    device = device_of(row)
    return loads(
        f"""
name: {row["src"]}
cluster: {{device: {device}, nodes: {max(1, gpus // per_node)}, devices_per_node: {min(gpus, per_node)}}}
mesh: {{dp: {number(row, "dp_rep")}, fsdp: {number(row, "fsdp")}, tp: {tp}}}
model: {{{MODELS[row["model"]]}, seq_len: {number(row, "seq")}, dtype: {dtype}}}
task: {"torch_loss:TorchCrossEntropy" if holds_logits(row) else "lm"}
sharding: {{{sharding}}}
fsdp:
  bucket: wrap
  wrap: {wrap}
  master_dtype: {row["master_dtype"]}
  param_dtype: {row["gather_dtype"]}
  reduce_dtype: {row["reduce_dtype"]}
  accumulate: {{reduce: {reduce}}}
remat: {REMAT[row["ac"]]}
compile: {"eager" if row["compile"] == "0" else "blocks" if eager_loss(row) else "inductor"}
batch: {{global_sequences: {number(row, "local_bs") * ranks * times}, per_device: {number(row, "local_bs")}}}
""",
        file=row["src"],
    )


def eager_loss(row: dict[str, str]) -> bool:
    return row["src"].startswith(("tt_2024", "kf_"))


def holds_logits(row: dict[str, str]) -> bool:
    """Whether the training loop holds the logits of a micro-batch until the next one has its own."""
    return row["src"].startswith("kf_")
