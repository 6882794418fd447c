"""Tries every causal language model class of the installed transformers: a training step, and a server's step.

    python benchmarks/every_class.py [--record] [--timeout SECONDS] [NAME ...]       model types, such as qwen3 mamba2

Each class gets a small configuration: its own defaults, with the sizes of SIZES. A class that cannot run so in
transformers itself is left out, with the reason. train: loss and gradients of a step on fsdp 2 x tp 2, all devices
simulated in this process, against transformers in one process, both in float64; the largest difference of a gradient,
relative to the largest of its parameter. serve: the logits of two tensor-parallel devices over the paged cache, in
fp32. What tpshard refuses is listed with the reason; a difference above 1e-4 (training: 1e-6) is `wrong`, and any other
exception is `crashed`.

`--record` writes benchmarks/records/every_class.json; names given replace their rows in it.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.models.transformers.architecture import Architecture
from tpshard.programs.compare.float64 import float64
from tpshard.programs.parts import step_programs
from tpshard.programs.parts.checks import traceable
from tpshard.programs.setting.setting import Setting

from record import ROOT, Record, in_one_line, parser_of

sys.path.insert(0, str(ROOT / "tests"))
import architectures
from servers import sequences_for

import gallery

MESH = {"fsdp": 2, "tp": 2}
SIZES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (32, ("hidden_size", "d_model", "n_embd", "embedding_size", "dim", "attention_hidden_size", "lru_width")),
    (48, ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim")),
    (2, ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers")),
    (4, ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
         "decoder_attention_heads", "linear_num_value_heads", "num_linear_attention_heads")),
    (4, ("mamba_n_heads", "mamba_num_heads")),
    (4, ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")),
    (2, ("num_key_value_heads", "num_kv_heads", "linear_num_key_heads")),
    (2, ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")),
    (8, ("head_dim", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim",
         "global_head_dim", "index_head_dim")),
    (4, ("rotary_dim", "qk_rope_head_dim", "state_size", "mamba_d_state", "ssm_state_size")),
    (16, ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "q_lora_rank",
          "shared_intermediate_size", "moe_shared_expert_intermediate_size", "hidden_size_per_layer_input")),
    (64, ("vocab_size", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length",
          "vocab_size_per_layer_input")),
    (1, ("n_shared_experts", "first_k_dense_replace", "topk_group", "n_group")),
    (16, ("mamba_d_head", "mamba_head_dim")),
    (5, ("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "attention_chunk_size",
         "local_attention")),
    (4, ("floor_scale", "log_scaling_n_floor", "rel_extent", "keep_window_size", "index_block_size")),
    (2, ("index_topk_blocks",)), (3, ("index_topk",)),
    (0, ("pad_token_id",)), (1, ("bos_token_id",)), (2, ("eos_token_id",)),
)  # fmt: skip
"""The value of each key of a configuration, where the class has the key and its default is a number."""
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_MIXED_LINEAR = {**_MIXED, "linear_num_heads": 4, "linear_head_dim": 8}
OF_CLASS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **_MIXED_LINEAR, "num_experts_per_token": 2, "num_expert_group": 1, "mlp_layer_types": ["dense", "sparse"],
    },
    "bamba": {"attn_layer_indices": [1], "mamba_chunk_size": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_chunk_size": 8},
    "granitemoehybrid": {**_MIXED, "mamba_chunk_size": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": {**_MIXED_LINEAR, "num_experts_per_token": 2, "mlp_layer_types": ["dense", "sparse"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0], "moe_layers": [1]},
    "mamba2": {"head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2, "chunk_size": 8, "num_hidden_layers": 4},
    "qwen3_5_text": {**_MIXED, "head_dim": 32},
    "qwen3_5_moe_text": {**_MIXED, "head_dim": 32},
    "qwen3_next": _MIXED,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {"layer_types": ["linear_attention", "hybrid"], "num_key_value_heads": 4},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "mamba_headdim": 16, "chunk_size": 8,
        "attention_hidden_size": 64, "attention_head_dim": 16, "hybrid_layer_ids": [1], "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid"]},
}  # fmt: skip
"""Keys of classes whose sizes depend on each other, or are lists."""


def classes() -> dict[str, type[Any]]:
    """The causal language model class of each model type that has one."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    loaded = {name: getattr(transformers, each, None) for name, each in names.items() if isinstance(each, str)}
    return {name: cls for name, cls in loaded.items() if isinstance(cls, type) and hasattr(cls, "config_class")}


def small(cls: type[Any]) -> dict[str, Any]:
    """A small configuration of a class, as config.json holds it."""
    config = cls.config_class(**_sizes(cls.config_class))
    return {**config.to_dict(), "architectures": [cls.__name__]}


def _sizes(config_class: type[Any]) -> dict[str, Any]:
    """The keys of a small configuration, and of those inside it, such as of a vision tower."""
    defaults = config_class()
    sizes: dict[str, Any] = {key: value for value, keys in SIZES for key in keys if _counts(defaults, key)}
    if "qk_rope_head_dim" in sizes:  # latent attention: one key per query, and rotations of a part of the head
        sizes |= {"head_dim": sizes["qk_rope_head_dim"], "num_key_value_heads": sizes["num_attention_heads"]}
    for key in config_class.sub_configs:
        if (inner := type(getattr(defaults, key, None))) is not type(None):
            sizes[key] = inner(**_sizes(inner)).to_dict()
    return sizes | OF_CLASS.get(config_class.model_type, {})


def _counts(defaults: Any, key: str) -> bool:
    """Whether a configuration has a key of its own whose default is a number, or stands for one."""
    if key in getattr(defaults, "attribute_map", {}) or isinstance(getattr(type(defaults), key, None), property):
        return False
    default = defaults.to_dict().get(key, "absent")
    stands = key.endswith("_id") or key == "head_dim" or "expert" in key or "moe" in key
    return isinstance(default, int) or (default is None and stands)


def outcome(what: Callable[[], Any], limit: float) -> Any:
    """The difference that `what` computes, or a dict with the key refused, wrong or crashed and the reason."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apart = what()
    except Mistakes as error:
        first = error.diagnostics[0]
        reason = first.message + (f": {first.why}" if first.why else "")
        return {"refused": reason.replace(sysconfig.get_path("purelib") + "/", "").replace(f"{ROOT}/", "")}
    except Exception as error:
        return {"crashed": in_one_line(error)}
    return apart if apart <= limit else {"wrong": apart}


def own(what: Callable[[], Any]) -> str:
    """ "" if transformers itself computes `what` with the configuration, else its error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            what()
    except Exception as error:
        return f"transformers: {in_one_line(error)}"
    return ""


def served(name: str) -> None:
    """Computes the logits of prompts as a server's are compared with."""
    recurrent = Architecture(architectures.config_of(name)).recurrent
    with torch.no_grad():
        for part in sequences_for((4,) if recurrent else None):
            architectures.own(name)(torch.from_numpy(part)[None])


def trained(name: str, folder: Path) -> float:
    """The largest difference of the loss and the gradients of a step, computed in float64."""
    setting = Setting.of(gallery.recipe(folder, MESH))
    with traceable(setting):
        program = step_programs.micro_program(setting)
    several = architectures.keeps_apart(name)
    batch = architectures.batch(several)
    with float64():
        loss, gradients = architectures.reference(name, batch, several)
        values = architectures.values(name)
        sums = [torch.zeros_like(value) for value in values.values()]
        loss_sum, _, *summed = program.simulate(*values.values(), *sums, *batch.values())
    return max(gallery.apart(loss_sum, loss), gallery.furthest(summed, list(gradients.values())))


def meets_silently(name: str) -> str:
    """ "" if documents of a row stay apart in tpshard's module, or a plan says that they meet; else what is wrong."""
    architecture, values = Architecture(architectures.config_of(name)), architectures.values(name)
    model = architecture.build()

    def logits(row: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, values, (row["tokens"], row["documents"], row["positions"]))

    behind, alone = architectures.second_document(logits)
    apart = torch.allclose(behind, alone, rtol=1e-3, atol=1e-3)
    if apart or any("document" in note for note in architecture.notes(model)):
        return ""
    return f"documents meet: {float((behind - alone).abs().max()):.1e}"


def examine(name: str, place: Path) -> dict[str, Any]:
    """The row of one model type."""
    cls = classes()[name]
    row: dict[str, Any] = {"name": name, "class": cls.__name__}
    torch.manual_seed(0)
    try:
        config = small(cls)
    except Exception as error:
        return row | {"left_out": f"no small configuration: {in_one_line(error)}"}
    with mock.patch.dict(architectures.CONFIGS, {name: config}):
        if reason := own(partial(architectures.reference, name, architectures.batch(False), False)):
            return row | {"left_out": reason}
        folder = architectures.folder(place / name, name)
        row["train"] = outcome(partial(trained, name, folder), 1e-6)
        if not isinstance(row["train"], dict) and (reason := meets_silently(name)):
            row["train"] = {"wrong": reason}
        reason = own(partial(served, name))
        row["serve"] = {"left_out": reason} if reason else outcome(partial(gallery.serves, name, folder), 1e-4)
    return row


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """TimeoutError for what takes longer."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def in_process(name: str, timeout: int) -> dict[str, Any]:
    """`examine` with a limit on its time."""
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()

    try:
        with limited(timeout), tempfile.TemporaryDirectory() as place:
            return examine(name, Path(place))
    except TimeoutError as error:
        return {"name": name, "class": classes()[name].__name__, "left_out": str(error)}


def result_of(row: dict[str, Any], verb: str) -> str:
    """One word for a verb's outcome: equal, refused, wrong, crashed or left_out."""
    if "left_out" in row:
        return "left_out"
    return next(iter(row[verb])) if isinstance(row[verb], dict) else "equal"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--timeout", type=int, default=240, help="seconds for one class")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    record = Record("every_class", quiet=options.json)
    names = sorted(classes())
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=8) as pool:
        for row in pool.imap_unordered(partial(in_process, timeout=options.timeout), options.names or names):
            record.rows.append(row)
            record.say(json.dumps(row))
    record.keep_others(names)
    for verb in ("train", "serve"):
        for result, count in sorted(Counter(result_of(row, verb) for row in record.rows).items()):
            record.figure(f"{verb}.{result.replace('_', '-')}", count, "classes")
            record.say(f"{verb}: {result} {count}")
    record.close(as_json=options.json, write=options.record)


if __name__ == "__main__":
    main()
