"""Published training runs as recipes: the rows of published_runs_2026.csv; `dense_rows` has those of the older file.

A row's stack says what its columns leave out. Megatron (`zero: 1`): parameters whole in bf16, gathered once a step;
gradients whole in fp32, reduced after the last micro-batch; master weights and moments sharded over the data ranks and
cp; pointwise operations fused as a compiler fuses them; stages of equally many layers. FSDP (`zero: 3`, or 2: gathered
once a micro-batch): fp32 shards, gathered in bf16. Composer compiles nothing: its pointwise operations stream at a
share of what fused ones would (`STREAMING`), fitted on two devices at once. Nothing is adapted to a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from tpshard.parallelism.pricing.fusion import Compiled
from tpshard.recipes.foreign.stacks import RankSizes
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads

DEVICES = {
    "A100-40GB": "a100-40g", "A100-80GB": "a100-80g", "H100-96GB": "h100-sxm-96g", "H100": "h100-sxm-80g",
    "B200": "b200",
}  # fmt: skip
"""The shipped devices of published GPUs, by the beginnings of their names."""
_MPT = "preset: granite-20b, layers: {}, width: {}, heads: {}, kv_heads: {}, head_dim: {}, mlp: {}, vocab: 50368"
MPT_SIZES = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip
"""Layers, width and heads of llm-foundry's configurations (scripts/train/yamls/pretrain)."""
STREAMING = {"": 1.0, "composer": 0.338, "composer_fp8": 0.567}
"""Bandwidth of a stack's pointwise operations, as a share of what the device's fused ones reach."""
MODELS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"llama3_(70|405)b": r"preset: llama3-\1b",
    r"Qwen3-(0\.6B|4B).*": lambda name: f"preset: qwen3-{name[1].lower()}",
    r"Llama-3 MoE dim2048 L24 (\d+)e top2.*": (
        r"preset: mixtral-8x7b, layers: 24, width: 2048, heads: 16, kv_heads: 4, mlp: 7168, vocab: 128256, experts: \1"
    ),
    r"Llama-3\.2-1B": "preset: llama3-1b",
    r"MPT-(\w+) .*": lambda name: _mpt(name[1]),
}
"""Patterns of published model names with the keys of `model` that say the same."""


class Missing(ValueError):
    """A recipe cannot say a row, for want of what each of `keys` names; their values are the row's words."""

    def __init__(self, keys: dict[str, str]):
        super().__init__("; ".join(f"{key}: {words}" for key, words in keys.items()))
        self.keys = keys


@dataclass(frozen=True)
class PublishedRun:
    """A published run with the recipe that says the same."""

    name: str
    recipe: Recipe
    device: str
    model: str
    parallelism: str
    fitted: bool
    """Whether constants may be fitted on it."""
    step_s: float | None
    memory_gib: float | None
    reserved: bool
    """Whether `memory_gib` is what the allocator has reserved."""
    claim: tuple[float, float] | None = None
    """The errors of another simulator's memory and seconds, as published."""
    compiled: Compiled | None = None
    """The part of its programs that was compiled, where a recipe cannot say it."""
    stack: str = ""
    """Its stack, one of `STREAMING`."""
    holds_logits: bool = False
    """Whether the training loop holds the logits of a micro-batch until the next one has its own."""


def run_of(row: dict[str, str]) -> PublishedRun:
    """The run of a row. Missing, with everything that is."""
    mesh = {
        axis: int(row[axis] or 1) if row[axis].isdigit() or not row[axis] else 0 for axis in ("pp", "ep", "cp", "tp")
    }
    missing = _missing(row, mesh)
    if missing:
        raise Missing(missing)
    ranks = " ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    claim = re.search(r"SimuMax \S+ predicts .*? \((\S+)%\), .*? \((\S+)%\)", row["note"])
    return PublishedRun(
        name=row["id"],
        recipe=loads(_text(row, mesh), file=row["id"]),
        device=device_of(row) or "",
        model=row["model"].split(" (")[0].replace(" cut to ", ", "),
        parallelism=f"{'zero 1' if row['zero'] == '1' else 'fsdp'} {ranks}".strip(),
        fitted=row["use"] == "fit",
        step_s=float(row["step_s"]) if row["step_s"] else None,
        memory_gib=float(row["mem_gib"]) if row["mem_gib"] else None,
        reserved="reserved" in row["mem_kind"],
        stack=f"composer{'_fp8' * ('fp8' in row['quant'])}" if row["stack"].startswith("Composer") else "",
        claim=(float(claim[2]) / 100, float(claim[1]) / 100) if claim else None,
    )


def _missing(row: dict[str, str], mesh: dict[str, int]) -> dict[str, str]:
    """What a recipe lacks to say a row, by key; what the row itself leaves out is `unsaid`."""
    missing: dict[str, str] = {}
    if row["outcome"] == "OOM" or not (row["step_s"] or row["mem_gib"]):
        missing["unsaid: time and memory"] = row["outcome"]
    if device_of(row) is None:
        missing["cluster.device"] = row["gpu"]
    if _model(row) is None:
        missing["model"] = re.sub(r" \(.*", "", row["model"])
    if row["lora"]:
        missing["unsaid: targets of adapters"] = row["lora"]
    if (row["quant"] or "none").lower() not in ("none", "bf16", "amp_fp8"):
        missing["model.dtype"] = row["quant"]
    if "RL loss" in row["note"]:  # its step also sends the weights to servers
        missing["unsaid: logits whole or in chunks"] = "rl"
    remat = row["remat"]
    if not remat or remat.startswith("see") or "check" in remat:
        missing["unsaid: remat"] = remat
    elif remat not in ("none", "full"):
        missing["remat: offload" if "offload" in remat else "remat by module"] = remat
    if mesh["cp"] > 1 and int(row["dp_rep"] or 1) * int(row["fsdp"] or 1) > 1:
        missing["fsdp.axis: several"] = f"cp {row['cp']}"
    if not (row["micro_bs"] and row["tp"] and all(mesh.values())):
        missing["unsaid: batch or mesh"] = row["note"]
    return missing


def device_of(row: dict[str, str]) -> str | None:
    """The shipped device of a row."""
    gpu = row.get("gpu") or ""
    if gpu.startswith("H200"):
        return "h200-x4" if row.get("gpus_per_node") == "4" else "h200"
    return next((device for name, device in DEVICES.items() if gpu.startswith(name)), None)


def _mpt(size: str) -> str:
    layers, width, heads = MPT_SIZES[size]
    return _MPT.format(layers, width, heads, heads, width // heads, 4 * width)


def _model(row: dict[str, str]) -> str | None:
    """The recipe's keys of a row's model."""
    name, _, layers = row["model"].removesuffix(" layers").partition(" cut to ")
    for pattern, said in MODELS.items():
        if match := re.fullmatch(pattern, name):
            return (match.expand(said) if isinstance(said, str) else said(match)) + f", layers: {layers}" * bool(layers)
    return None


def _text(row: dict[str, str], mesh: dict[str, int]) -> str:
    """The recipe of a row as YAML."""
    megatron, model = row["zero"] == "1", _model(row) or ""
    fused = megatron or row["stack"].startswith("Composer")
    micro, times, data = int(row["micro_bs"]), int(row["n_micro"] or 1), int(row["dp_rep"] or 1) * int(row["fsdp"])
    # experts have an axis of their own, which Megatron takes from the data ranks
    sizes = {**mesh, "fsdp": data // (mesh["ep"] if megatron else 1)}
    ranks = RankSizes(**sizes, sequence=row["sp"] == "1")
    pipeline = ""
    if mesh["pp"] > 1:
        rounds = int(row["vpp"] or 1)
        pipeline = f"pipeline: {{schedule: {'interleaved_1f1b' if rounds > 1 else '1f1b'}, rounds: {rounds}}}"
    gpus, per_node = int(row["gpus"]), int(row["gpus_per_node"])
    longest = max(int(row["seq"]), 2048) if "granite" in model else 131072
    return f"""
name: row
cluster: {{device: {device_of(row)}, nodes: {max(1, gpus // per_node)}, devices_per_node: {min(gpus, per_node)}}}
mesh: {{{", ".join(f"{axis}: {size}" for axis, size in sizes.items() if size > 1 or axis == "fsdp")}}}
model: {{{model}, seq_len: {row["seq"]}, max_seq: {longest}, dtype: {"fp8" if "fp8" in row["quant"] else "bf16"}}}
sharding: {{rules: {json.dumps(ranks.rules)}, annotate: {json.dumps(ranks.annotate)}}}
fsdp:
  axis: {"cp" if mesh["cp"] > 1 else "fsdp"}
  wrap: [layers.*, [tok_embed], [norm, output]]
  bucket: wrap
  master_dtype: {"bf16" if row["param_dtype"] == "bf16" and not megatron else "fp32"}
  reduce_dtype: {row["reduce_dtype"] or "fp32"}
  reshard_after_forward: {str(row["zero"] != "2").lower()}
  accumulate: {"{gather: step, reduce: last}" if megatron else "{}"}
remat: {row["remat"]}
compile: {"inductor" if fused else "blocks" if row["compile"] == "1" else "eager"}
batch: {{global_sequences: {micro * times * ranks.data}, per_device: {micro}}}
{pipeline}"""
