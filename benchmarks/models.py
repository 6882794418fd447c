"""Partitions transformers' models unchanged, and compares the simulated devices' results with eager mode.

    python benchmarks/models.py [NAME ...] [--mesh NUMBER ...] [--forward] [--json] [--record]

Runs small random configurations of many families, forward and a step with the gradients of all parameters, with the
batch sharded over all axes of a mesh. A program is right if all results of all devices equal eager mode's to 1e-4 of
their largest element. FLOP efficiency is the share of FLOPs that no device repeats. A device has four rows, since what
is computed once for all rows (tables of positions) is repeated by every device; on three devices it has more, so that
padding costs less than 3%. `--record` writes benchmarks/records/models.json.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tpshard.parallelism import Mesh, partition

from record import ROOT, Record, in_one_line, parser_of

sys.path.insert(0, str(ROOT / "tests"))
import architectures

MESHES = {"2x2": {"x": 2, "y": 2}, "4": {"x": 4}, "3": {"x": 3}, "2x4": {"x": 2, "y": 4}}
BATCH = {"2x2": 16, "4": 16, "3": 71, "2x4": 32}
LENGTH, VOCAB = 12, 64
_BERT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_STILL = {"attention_dropout": 0.0, "activation_dropout": 0.0, "dropout": 0.0}


@dataclass(frozen=True)
class Family:
    """A class of transformers with a configuration, and a function that makes its inputs for a batch size."""

    model: str
    config: dict[str, Any]
    inputs: Callable[[int], dict[str, Tensor]]


def _ids(name: str = "input_ids", length: int = LENGTH) -> Callable[[int], dict[str, Tensor]]:
    return lambda rows: {name: torch.randint(3, VOCAB, (rows, length), generator=_generator())}


def _both(*parts: Callable[[int], dict[str, Tensor]]) -> Callable[[int], dict[str, Tensor]]:
    return lambda rows: {name: value for part in parts for name, value in part(rows).items()}


def _numbers(name: str, *shape: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda rows: {name: torch.randn(rows, *shape, generator=_generator())}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _causal(name: str, *without: str) -> Family:
    """A causal language model of the gallery; `without` are its kinds of dropout."""
    config = architectures.CONFIGS[name]
    return Family(config["architectures"][0], {**config, **dict.fromkeys(without, 0.0)}, _ids())


FAMILIES = {
    "gpt2": _causal("gpt2", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "bert": Family("BertForMaskedLM", _BERT, _ids()),
    "t5": Family("T5ForConditionalGeneration", {
        "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0, "pad_token_id": 0}, _both(_ids(), _ids("decoder_input_ids", 6))),
    "vit": Family("ViTForImageClassification", {
        **{k: v for k, v in _BERT.items() if k != "vocab_size"}, "image_size": 16, "patch_size": 4, "num_labels": 5},
        _numbers("pixel_values", 3, 16, 16)),
    **{name: _causal(name) for name in ("gemma2", "qwen3", "mixtral", "qwen2_moe")},
    "bloom": _causal("bloom", "hidden_dropout", "attention_dropout"),
    "falcon": _causal("falcon", "attention_dropout", "hidden_dropout"),
    "mamba": _causal("mamba"),
    "whisper": Family("WhisperForConditionalGeneration", {
        "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
        "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "begin_suppress_tokens": None, "suppress_tokens": None, **_STILL},
        _both(_numbers("input_features", 8, 32), _ids("decoder_input_ids", 6))),
    "conformer": Family("Wav2Vec2ConformerModel", {
        **{k: v for k, v in _BERT.items() if "drop" not in k}, "conv_dim": (16, 16), "conv_stride": (4, 2),
        "conv_kernel": (8, 4), "num_feat_extract_layers": 2, "conv_depthwise_kernel_size": 5,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "conformer_conv_dropout": 0.0,
        "layerdrop": 0.0, "apply_spec_augment": False}, _numbers("input_values", 160)),
    "resnet": Family("ResNetForImageClassification", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic", "num_labels": 5},
        _numbers("pixel_values", 3, 32, 32)),
    "convnext": Family("ConvNextForImageClassification", {
        "hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "num_labels": 5, "drop_path_rate": 0.0},
        _numbers("pixel_values", 3, 32, 32)),
}  # fmt: skip


def tensors(outputs: Any) -> list[Tensor]:
    """The floating-point tensors among a model's results."""
    flat = torch.utils._pytree.tree_flatten(dict(outputs))[0]
    return [m for m in flat if isinstance(m, Tensor) and m.is_floating_point()]


class Program:
    """A model as a function of its inputs, parameters and buffers."""

    def __init__(self, family: Family, rows: int, step: bool):
        import transformers

        torch.manual_seed(0)
        model = getattr(transformers, family.model)
        config = model.config_class(**family.config)
        if hasattr(config, "num_experts_per_tok"):
            config._experts_implementation = "batched_mm"  # the other ways loop over what data says
        self.model = model(config).train(step)
        self.inputs, self.step = family.inputs(rows), step
        self.state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self.trained = set(dict(self.model.named_parameters()))
        self.args = [*self.inputs.values(), *(value.detach() for value in self.state.values())]

    def __call__(self, *args: Tensor) -> list[Tensor]:
        inputs = dict(zip(self.inputs, args))
        state = dict(zip(self.state, args[len(inputs) :]))
        if self.step:
            state = {k: v.detach().requires_grad_() if k in self.trained else v.clone() for k, v in state.items()}
        kwargs = {} if "Image" in type(self.model).__name__ or "Wav2Vec2" in type(self.model).__name__ else {
            "use_cache": False
        }  # fmt: skip
        outputs = tensors(torch.func.functional_call(self.model, state, (), {**inputs, **kwargs}))
        if not self.step:
            return outputs
        loss = sum((m.float() * m.detach().float().cos()).mean() for m in outputs)
        parameters = [v for k, v in state.items() if k in self.trained]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)  # type: ignore[arg-type]
        return [loss.detach(), *(g for g in gradients if g is not None)]  # type: ignore[union-attr]


def apart(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest element of its tensor."""
    pairs = zip(actual, expected, strict=True)
    return max(float((a - e).abs().max() / e.abs().max().clamp_min(1e-3)) for a, e in pairs)


def measure(name: str, mesh: str, step: bool) -> dict[str, Any]:
    """The row of one program: difference from eager mode, efficiency, warnings."""
    row: dict[str, Any] = {"model": name, "mesh": mesh, "what": "step" if step else "forward"}
    began = time.perf_counter()
    program = Program(FAMILIES[name], BATCH[mesh], step)
    axes = tuple(MESHES[mesh])
    dims = [((axes if len(axes) > 1 else axes[0]),)] * len(program.inputs)
    partitioned = partition(program, program.args, Mesh(MESHES[mesh]), [*dims, *[()] * len(program.state)])
    expected = program(*program.args)
    row["apart"] = apart(partitioned.simulate(*program.args), expected)
    row["efficiency"] = partitioned.flop_efficiency
    row["warnings"] = [str(w) for w in partitioned.warnings]
    row["collectives"] = len(partitioned.collectives)
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def holds(row: dict[str, Any]) -> bool:
    ruled = not any("no rule" in w for w in row.get("warnings", ()))
    return "error" not in row and row["apart"] <= 1e-4 and row["efficiency"] >= 0.97 and ruled


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FAMILIES))
    parser.add_argument("--mesh", nargs="*", choices=list(MESHES), default=list(MESHES))
    parser.add_argument("--forward", action="store_true", help="no steps with gradients")
    options = parser.parse_args()
    if unknown := set(options.names) - set(FAMILIES):
        parser.error(f"no model {', '.join(sorted(unknown))}: {', '.join(FAMILIES)}")
    warnings.simplefilter("ignore")
    record = Record("models", quiet=options.json)
    record.say(f"{'model':<10} {'what':<8} {'mesh':<4} {'apart':>8} {'FLOPs':>6} {'collectives':>11} {'s':>6}")
    for name in options.names or FAMILIES:
        for step in (False,) if options.forward else (False, True):
            for mesh in options.mesh:
                try:
                    row = measure(name, mesh, step)
                except Exception as error:
                    what = "step" if step else "forward"
                    row = {"model": name, "mesh": mesh, "what": what, "error": in_one_line(error)}
                record.rows.append(row)
                first = f"{name:<10} {row['what']:<8} {mesh:<4}"
                if "error" in row:
                    record.say(f"{first} {row['error']}")
                    continue
                record.say(
                    f"{first} {row['apart']:>8.1e} {row['efficiency']:>6.3f} {row['collectives']:>11} "
                    f"{row['seconds']:>6}{'' if holds(row) else '  does not hold'}"
                )
                for warning in row["warnings"]:
                    record.say(f"    {warning[:150]}")
    record.figure("programs", len(record.rows), "programs")
    record.figure("hold", sum(map(holds, record.rows)), "programs")
    record.say(f"{sum(map(holds, record.rows))} of {len(record.rows)} hold")
    record.close(as_json=options.json, write=options.record)


if __name__ == "__main__":
    main()
