"""Flips every switch of every causal language model's configuration, and compares logits with transformers'.

    python benchmarks/every_switch.py [--record] [NAME ...]       model types; all take two minutes

A class of transformers behaves otherwise with another configuration, and nothing says which parts of it tpshard's
operations for attention, experts and rotations replace. So each class of `every_class.py`, in its small configuration,
is tried with each boolean key flipped, with a short sliding window and with each type of rotary scaling, beyond the
length at which it sets in. The logits of tpshard's module are compared with those of transformers' own, in one process,
in fp32: `equal` within 2e-4 of the largest. What transformers itself refuses is left out; `refused` names what tpshard
refuses.

Keys that change training alone (dropout, noise, losses of routers, the row of padding) are set one by one, and the
gradients of transformers' loss in its training mode are compared: `train_equal`, or `train_named` where they differ and
a plan says it of the key, or `train_unnamed`.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from tpshard.models.families.config_keys import changes_training
from tpshard.models.transformers.architecture import Architecture

from every_class import architectures, classes, limited, small
from record import Record, in_one_line, parser_of

SECONDS = 40
"""The limit for one configuration."""
NOT_SWITCHES = {
    "use_cache", "return_dict", "tie_word_embeddings", "is_encoder_decoder", "is_decoder", "add_cross_attention",
    "torchscript", "use_mamba_kernels",
}  # fmt: skip
"""Boolean keys that select an output, another task or another kernel; so do those that begin with `output_`."""
ROTATIONS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8},
)  # fmt: skip


def variants(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (what is changed, the changed configuration)."""
    for key, value in config.items():
        if isinstance(value, bool) and key not in NOT_SWITCHES and not key.startswith("output_"):
            yield f"{key}: {not value}", {**config, key: not value}
    if "sliding_window" in config:  # shorter than the sequences; in all layers, where layers differ in it
        every = {name: value for name, value in
                 (("use_sliding_window", True), ("layer_types", ["sliding_attention"] * config["num_hidden_layers"]))
                 if name in config}  # fmt: skip
        yield "sliding_window: 3", {**config, **every, "sliding_window": 3}
    rotation = config.get("rope_parameters")
    if not isinstance(rotation, dict):
        return
    head = config.get("head_dim") or config["hidden_size"] // config.get("num_attention_heads", 4)
    for scaling in ROTATIONS:
        pairs = int(head * rotation.get("partial_rotary_factor", 1.0)) // 2
        factors = {f"{name}_factor": [start + 0.2 * i for i in range(pairs)] for name, start in
                   (("short", 1.0), ("long", 2.0))}  # fmt: skip
        more = {**scaling, **(factors if scaling["rope_type"] == "longrope" else {})}
        every = {**rotation, **more} if "rope_type" in rotation else {
            kind: {**own, **more} if isinstance(own, dict) else own for kind, own in rotation.items()
        }  # fmt: skip
        changed = {"max_position_embeddings": 8} if scaling["rope_type"] == "dynamic" else {}
        yield f"rope_type: {scaling['rope_type']}", {**config, **changed, "rope_parameters": every}


def training_keys(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (a key that changes training, the configuration in which only it does)."""
    keys = [key for key, value in config.items() if changes_training(key) and not isinstance(value, dict)]
    still = config | {key: False if isinstance(config[key], bool) else 0.0 for key in keys if key != "pad_token_id"}
    for key in keys:
        value: Any = 5 if key == "pad_token_id" else True if isinstance(config[key], bool) else 0.5
        weights = {name: 1.0 for name in config if name.endswith("aux_loss_coef")}
        yield key, still | weights | {"pad_token_id": None} | {key: value}


def shifted(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of each next token."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def training(name: str, config: dict[str, Any], key: str) -> Any:
    """train_equal, train_named or train_unnamed as a dict's key; left_out where transformers does not train it."""
    tokens = architectures.batch(False)["tokens"][:2] % 8
    with mock.patch.dict(architectures.CONFIGS, {name: config}):
        try:
            values, own = architectures.values(name), architectures.own(name).train()
            leaves = {path: value.requires_grad_() for path, value in values.items() if value.is_floating_point()}
            torch.manual_seed(0)
            inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
            output = torch.func.functional_call(own, values, (), inputs)
            loss, further = shifted(output.logits, tokens), getattr(output, "aux_loss", None)
            loss = loss + further if isinstance(further, torch.Tensor) else loss
            expected = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        except Exception as error:
            return {"left_out": f"transformers: {in_one_line(error)}"}
        try:
            architecture = Architecture(architectures.config_of(name))
            model = architecture.build()
            loss = shifted(torch.func.functional_call(model, values, (tokens,)), tokens)
            actual = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        except ValueError as error:
            return {"refused": " ".join(str(error).split())[:200]}
        except Exception as error:
            return {"crashed": in_one_line(error)}
    pairs = [(a, b) for a, b in zip(actual, expected) if a is not None and b is not None]
    largest = max(float(b.abs().max()) for _, b in pairs)
    if max(float((a - b).abs().max()) for a, b in pairs) <= 2e-4 * largest:
        return {"train_equal": key}
    return {"train_named" if any(key in note for note in architecture.notes(model)) else "train_unnamed": key}


def outcome(name: str, config: dict[str, Any]) -> Any:
    """The largest difference of a logit, or a dict with the key left_out, refused, wrong or crashed and the reason."""
    batch = {key: rows[:2] for key, rows in architectures.batch(False).items()}
    with mock.patch.dict(architectures.CONFIGS, {name: config}), torch.no_grad():
        try:
            values, own = architectures.values(name), architectures.own(name)
            inputs = {"input_ids": batch["tokens"], "use_cache": False}
            expected = torch.func.functional_call(own, values, (), inputs).logits
        except Exception as error:
            return {"left_out": f"transformers: {in_one_line(error)}"}
        if not torch.isfinite(expected).all():
            return {"left_out": "transformers' own logits are not finite"}
        try:
            model = Architecture(architectures.config_of(name)).build()
            read = (batch["tokens"], batch["documents"], batch["positions"])
            apart = torch.func.functional_call(model, values, read) - expected
        except ValueError as error:
            return {"refused": " ".join(str(error).split())[:200]}
        except Exception as error:
            return {"crashed": in_one_line(error)}
    relative = float(apart.abs().max() / expected.abs().max())
    return relative if relative <= 2e-4 else {"wrong": relative}


def in_time(name: str, config: dict[str, Any], key: str | None = None) -> Any:
    """`outcome`, or with a key `training`, or that it took too long."""
    try:
        with limited(SECONDS):
            return outcome(name, config) if key is None else training(name, config, key)
    except TimeoutError as error:
        return {"left_out": str(error)}


def main() -> None:
    import transformers

    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    record = Record("every_switch", quiet=options.json)
    for name, cls in sorted(classes().items()):
        if options.names and name not in options.names:
            continue
        try:
            config = small(cls)
        except Exception:  # every_class.py says why
            continue
        if isinstance(in_time(name, config), dict):
            continue
        results = {changed: in_time(name, other) for changed, other in variants(config)}
        trained = {key: in_time(name, other, key) for key, other in training_keys(config)}
        trained = {f"training with {key}": one for key, one in trained.items() if "left_out" not in one}
        notable = {changed: one for changed, one in results.items() if isinstance(one, dict) and "left_out" not in one}
        row = {"name": name, "tried": len(results), **notable, **trained}
        row["equal"] = sum(not isinstance(one, dict) for one in results.values())
        record.rows.append(row)
        record.say(json.dumps(row))
    notable_results = Counter(next(iter(one)) for row in record.rows for one in row.values() if isinstance(one, dict))
    counts = {
        "equal": sum(row["equal"] for row in record.rows),
        "refused": 0,
        "wrong": 0,
        "crashed": 0,
        "train_equal": 0,
        "train_named": 0,
        "train_unnamed": 0,
    } | notable_results
    for result, count in counts.items():
        record.figure(result, count, "configurations")
    record.close(as_json=options.json, write=options.record)


if __name__ == "__main__":
    main()
