"""Published training runs as recipes: the rows of published_runs_2026.csv; `dense_rows` has those of the older file.

A row's stack says what its columns leave out. Megatron (`zero: 1`): parameters whole in bf16, gathered once a step;
gradients whole in fp32, reduced after the last micro-batch; master weights and moments sharded over the data ranks and
cp; pointwise operations fused as a compiler fuses them; stages of equally many layers. FSDP (`zero: 3`, or 2: gathered
once a micro-batch): fp32 shards, gathered in bf16. Composer compiles nothing: its pointwise operations stream at a
share of what fused ones would (`STREAMING`), fitted on two devices at once. NeMo AutoModel stores what it loads, bf16,
with gradients and moments, and computes norms and SwiGLU by Liger's or TE's kernels; its benchmarks
(examples/llm_benchmark) have LoRA on all linear layers, and recompute from 32B on. prime-rl's `sft` casts whole logits
to fp32 and, until this was mended in 2026, held them to the end of the backward pass (`out` of trainer/sft/train.py);
its `rl` has a chunked head, also in January: whole logits alone would exceed its memory; it then looked for the ends
of sequences in a loop over a tensor of the device, an element at a time, while the device waited (`TOKEN_S`). The step
of Megatron-Bridge's Moonlight is its host's (`HOST_S`). Nothing is adapted to a row. Reserved memory is with
expandable segments, which both stacks that state it set.

KempnerForge's mixtures are left out: each expert is padded to the tokens of the fullest one (model/moe.py), in runs of
20 steps from random weights, whose load nobody published.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from tpshard.devices.read import device as read_device
from tpshard.parallelism.pricing.fusion import Compiled
from tpshard.recipes.foreign.stacks import RankSizes
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads

from published_models import keys_of

DEVICES = {
    "A100-40GB": "a100-40g", "A100-80GB": "a100-80g", "H100-96GB": "h100-sxm-96g", "H100": "h100-sxm-80g",
    "B200": "b200", "B300": "b300", "GB200": "gb200", "GB300": "gb300", "RTX-A6000": "rtx-a6000",
}  # fmt: skip
"""The shipped devices of published GPUs, by the beginnings of their names."""
STREAMING = {"": 1.0, "composer": 0.338, "composer_fp8": 0.567}
"""Bandwidth of a stack's pointwise operations, as a share of what the device's fused ones reach."""


HOPPER = 3.35
"""Rate of attention kernels made for Hopper (FlashAttention 3, TE's) as a multiple of what H100's constants say, which
are of older ones; fitted, with `TOKEN_S`, on the four rows for fitting of prime-rl and AutoModel."""
ATTENTION = {("h100-sxm-80g", "flash_attention_3"): HOPPER, ("h100-sxm-80g", "TE"): HOPPER,
             ("b200", "flash_attention_2"): None}  # fmt: skip
"""Rates of attention kernels that are not those of the device's constants, as multiples. None: no row for fitting tells
it, and steps are not compared."""


HOST_S = {"Megatron-Bridge": 0.0181}
"""Seconds in which a stack's host issues a layer's operations, forward and backward: no step takes less. Fitted on the
two rows for fitting of Moonlight, whose GPUs wait for it."""


TOKEN_S = 25e-6
"""Seconds a token in which prime-rl's `rl` of January 2026 reads positions one by one (`get_response_lengths` of
trainer/utils.py) and its device waits."""


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
    attention: float = 1.0
    """How many times as fast as the device's constants say its attention is."""
    host_s: float = 0.0
    """The seconds of `HOST_S`."""
    idle_s: float = 0.0
    """Seconds of a step in which the device waits for its host."""
    held_logits: int = 0
    """Bytes of each element of a micro-batch's logits that the training loop holds until the next one has its own."""


def run_of(row: dict[str, str]) -> PublishedRun:
    """The run of a row. Missing, with everything that is."""
    mesh = {
        axis: int(row[axis] or 1) if row[axis].isdigit() or not row[axis] else 0 for axis in ("pp", "ep", "cp", "tp")
    }
    missing = _missing(row, mesh)
    if missing:
        raise Missing(missing)
    ranks = " ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    device = device_of(row) or ""
    kernel = row["attention"] or ("TE" if re.search(r"\bTE\b|Megatron", row["stack"]) else "")
    attention = ATTENTION.get((device, kernel), 1.0)
    # a device without constants has no point; sending whole weights to servers is a part of some steps
    timed = read_device(device).fitted and attention is not None and not (_rl(row) and not row["lora"])
    # what is frozen is stored in fp32 there, and here as it is used
    held = not (_rl(row) and row["lora"])
    if not (timed and row["step_s"]) and not (held and row["mem_gib"]):
        raise Missing({"unsaid: time and memory": row["note"]})
    claim = re.search(r"SimuMax \S+ predicts .*? \((\S+)%\), .*? \((\S+)%\)", row["note"])
    return PublishedRun(
        name=row["id"],
        recipe=loads(_text(row, mesh), file=row["id"]),
        device=device,
        model=row["model"].split(" (")[0].replace(" cut to ", ", "),
        parallelism=f"{'zero 1' if row['zero'] == '1' else 'fsdp'} {ranks}".strip(),
        fitted=row["use"] == "fit",
        step_s=float(row["step_s"]) if row["step_s"] and timed else None,
        memory_gib=float(row["mem_gib"]) if row["mem_gib"] and held else None,
        reserved="reserved" in row["mem_kind"],
        stack=f"composer{'_fp8' * ('fp8' in row['quant'])}" if row["stack"].startswith("Composer") else "",
        claim=(float(claim[2]) / 100, float(claim[1]) / 100) if claim else None,
        attention=attention or 1.0,
        host_s=HOST_S.get(row["stack"].partition(" ")[0], 0.0),
        idle_s=TOKEN_S * int(row["micro_bs"]) * int(row["n_micro"]) * int(row["seq"]) if _rl(row) else 0.0,
        held_logits=4 if _whole(row) else 0,
    )


def _rl(row: dict[str, str]) -> bool:
    """Whether the row is of a reinforcement learner's trainer."""
    return "RL loss" in row["note"]


def _whole(row: dict[str, str]) -> bool:
    """Whether the loss is torch's, of whole logits in fp32, which the loop holds."""
    return row["stack"].startswith("prime-rl") and not _rl(row)


OFFLOADED = " + activation CPU offload"
"""What a row's `remat` ends in where activations wait in the host's memory."""


def _remat(row: dict[str, str]) -> str | None:
    """The row's `remat`: none or full; "" where it is not said, None where no recipe can say it."""
    words = row["remat"].removeprefix("selective: ").removesuffix(OFFLOADED)
    if row["stack"].startswith("NeMo AutoModel") and words.startswith("full") and not row["model"].startswith("GPT"):
        return "none" if row["gpus"] == "1" else "full"
    if not words or words.startswith("see") or "check" in words:
        return ""
    modules = [f"model.layers.*.{norm}" for norm in ("input_layernorm", "post_attention_layernorm")]
    said = {"core_attn": "none", "moe_act": "none", "layernorm+moe_act": json.dumps({"modules": modules})}
    return said.get(words) or (words if words in ("none", "full") else None)


def _missing(row: dict[str, str], mesh: dict[str, int]) -> dict[str, str]:
    """What a recipe lacks to say a row, by key; what the row itself leaves out is `unsaid`."""
    missing: dict[str, str] = {}
    if row["outcome"] == "OOM" or not (row["step_s"] or row["mem_gib"]):
        missing["unsaid: time and memory"] = row["outcome"]
    if device_of(row) is None:
        missing["cluster.device"] = row["gpu"]
    if keys_of(row["model"]) is None:
        missing["model"] = re.sub(r" \(.*", "", row["model"])
    if row["lora"] and not row["stack"].startswith(("prime-rl", "NeMo AutoModel")):
        missing["unsaid: targets of adapters"] = row["lora"]
    if (row["quant"] or "none").lower() not in ("none", "bf16", "amp_fp8"):
        missing["model.dtype"] = row["quant"]
    if _rl(row) and "2026-06" in row["note"]:  # less than its own optimizer's state and the layers' inputs take
        missing["unsaid: what a later version holds"] = row["note"]
    if " MoE " in row["model"]:
        missing["unsaid: load of the fullest expert"] = row["stack"]
    if (remat := _remat(row)) is None:
        missing["remat by module"] = row["remat"]
    elif not remat:
        missing["unsaid: remat"] = row["remat"]
    if not (row["micro_bs"] and row["tp"] and all(mesh.values())):
        missing["unsaid: batch or mesh"] = row["note"]
    return missing


def device_of(row: dict[str, str]) -> str | None:
    """The shipped device of a row."""
    gpu = row.get("gpu") or ""
    if gpu.startswith("H200"):
        return "h200-x4" if row.get("gpus_per_node") == "4" else "h200"
    return next((device for name, device in DEVICES.items() if gpu.startswith(name)), None)


def _text(row: dict[str, str], mesh: dict[str, int]) -> str:
    """The recipe of a row as YAML."""
    megatron, model = row["zero"] == "1", keys_of(row["model"]) or ""
    composer, automodel = row["stack"].startswith("Composer"), row["stack"].startswith("NeMo AutoModel")
    micro, times, data = int(row["micro_bs"]), int(row["n_micro"] or 1), int(row["dp_rep"] or 1) * int(row["fsdp"])
    ranks = RankSizes(**{**mesh, "fsdp": data}, sequence=row["sp"] == "1")
    rules = ranks.rules
    if mesh["ep"] > 1 and ranks.devices > int(row["gpus"]):  # experts are spread over the data ranks
        experts = {"ep": mesh["ep"], "fsdp": data // mesh["ep"]} if data % mesh["ep"] == 0 else {"ep": 1, "fsdp": data}
        ranks = replace(ranks, **experts)
        # Megatron spreads them over the ranks of tp too
        rules = ranks.rules | ({"expert": ["fsdp", "tp"]} if experts["ep"] == 1 else {})
        if mesh["tp"] > 1 and row["stack"].startswith("Megatron-Core"):  # its scripts: --expert-tensor-parallel-size 1
            ranks = replace(ranks, ep=1, fsdp=data).with_whole_experts(mesh["ep"])
            rules = ranks.rules
    sizes = {axis: getattr(ranks, axis) for axis in ("pp", "fsdp", "ep", "cp", "tp")}
    pipeline = ""
    if mesh["pp"] > 1:
        rounds, layers = int(row["vpp"] or 1), int((re.findall(r"cut to (\d+)", row["model"]) or ["1"])[0])
        stages = mesh["pp"] * rounds
        split = f", split: {[layers // stages] * stages}" if layers % stages == 0 else ""
        schedule = "interleaved_1f1b" if rounds > 1 else "1f1b"
        pipeline = f"pipeline: {{schedule: {schedule}, rounds: {rounds}{split}}}"
    gpus, per_node = int(row["gpus"]), int(row["gpus_per_node"])
    longest = f", max_seq: {max(int(row['seq']), 2048) if 'granite' in model else 131072}"
    wrap, residual = "[layers.*, [tok_embed], [norm, output]]", dict(ranks.annotate)
    if model.startswith("transformers"):
        wrap, longest = "[model.layers.*, [model.embed_tokens], [model.norm, lm_head]]", ""
        residual = {f"model.{pattern}": names for pattern, names in residual.items()}
    # torch's tensor parallelism waits for each exchange; Megatron computes gradients of weights meanwhile
    waits = ", overlap: false" if mesh["tp"] > 1 and not row["stack"].startswith("Megatron") else ""
    lora = ""
    if row["lora"]:  # as many parameters as several adapters have
        rank = 16 * int((re.findall(r"(\d+) adapters", row["lora"]) or ["1"])[0])
        lora = f"adapters: {{lora: {{rank: {rank}, alpha: 32}}}}"
    accumulate = "{gather: step, reduce: last}" if megatron else "{dtype: bf16}" if automodel else "{}"
    fused = megatron or composer or row["stack"].startswith("Megatron")  # by kernels of its own
    compiled = "inductor" if fused else "blocks" if row["compile"] == "1" or automodel else "eager"
    return f"""
name: row
cluster: {{device: {device_of(row)}, nodes: {max(1, gpus // per_node)}, devices_per_node: {min(gpus, per_node)}}}
mesh: {{{", ".join(f"{axis}: {size}" for axis, size in sizes.items() if size > 1 or axis == "fsdp")}}}
model: {{{model}, seq_len: {row["seq"]}{longest}, dtype: {"fp8" if "fp8" in row["quant"] else "bf16"}}}
{lora}
task: {"torch_loss:TorchCrossEntropyFp32" if _whole(row) else "lm"}
loss: {{chunks: {int(row["seq"]) // 512 if _rl(row) else 1}}}
sharding: {{rules: {json.dumps(rules)}, annotate: {json.dumps(residual)}{waits}}}
fsdp:
  axis: {json.dumps(ranks.storage)}
  wrap: {wrap}
  bucket: wrap
  master_dtype: {"bf16" if automodel or (row["param_dtype"] == "bf16" and not megatron) else "fp32"}
  reduce_dtype: {row["reduce_dtype"] or "fp32"}
  reshard_after_forward: {str(row["zero"] != "2").lower()}
  accumulate: {accumulate}
remat: {_remat(row)}
offload: {"activations" if row["remat"].endswith(OFFLOADED) else "none"}
compile: {compiled}
batch: {{global_sequences: {micro * times * ranks.data}, per_device: {micro}}}
{pipeline}"""
