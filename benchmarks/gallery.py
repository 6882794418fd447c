"""Tries transformers' models on small random configurations: plan, train, serve and quantize each, and makes a table.

    python benchmarks/gallery.py [--record] [--docs] [NAME ...]      rows of other names stay

plan: a training step is captured, propagated and partitioned on fsdp 2 x tp 2. train: its loss and its gradients are
transformers' own in one process, in fp32, on {tp}, {fsdp, tp} and {dp, fsdp, tp}; the largest difference of a gradient,
relative to the largest of its parameter. serve: a step over the paged cache on two devices gives transformers' logits.
gptq: a GPTQ folder of it, in act-order, gives on two devices the logits of the dense weights that it stands for.
quantize: the loss after `tpshard quantize`, by transformers with the weights that the folder stands for, less the
reported one. Encoders (BERT, T5, ViT) have no language model's loss: a step with a loss of the user's is partitioned by
`tpshard.parallelism.partition`.

All devices are simulated in this process. `--docs` writes the table into docs/transformers.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from tpshard.cli.shared.serve_worker import stored_weights
from tpshard.cli.shared.sources import open_source
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.kernels.quantized.gptq_solver import Settings
from tpshard.models.transformers.architecture import Architecture
from tpshard.models.transformers.class_weights import FolderWeights
from tpshard.models.transformers_model import TransformersModel
from tpshard.parallelism import Mesh, partition
from tpshard.programs.parts import step_programs
from tpshard.programs.server.serve_setting import ServeSetting, Size
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.server.serving import build_serving
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.weights import Weights
from tpshard.serve.quantizing.quantize_layers import Quantizer
from tpshard.serve.quantizing.task_rows import text_rows
from tpshard.serve.quantizing.write_quantized import write_quantized

from record import ROOT, Record, close_with_table, parser_of

sys.path.insert(0, str(ROOT / "tests"))
import architectures
import gptq_folders as folders
from servers import lockstep, programs_of, prompts, sequences_for

from models import FAMILIES, Program

MESHES = ({"tp": 2}, {"fsdp": 2, "tp": 2}, {"dp": 2, "fsdp": 2, "tp": 2})
BOUND = 1e-5
RECIPE = """
name: gallery
cluster: {device: cpu}
model: {transformers: FOLDER, seq_len: 12, dtype: fp32}
batch: {global_sequences: 8}
serve: {mesh: {tp: 2}}
compile: eager
"""


def recipe(folder: Path, mesh: Mapping[str, int]) -> Any:
    sizes = ", ".join(f"{axis}: {size}" for axis, size in mesh.items())
    each = 8 // (mesh.get("dp", 1) * mesh.get("fsdp", 1))
    text = RECIPE.replace("FOLDER", f"'{folder}'") + f"mesh: {{{sizes}}}\n"
    return loads(text, [f"batch.per_device={each}"])


def apart(computed: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """The largest difference, relative to the largest element, or to a thousandth of `scale` if that is larger.

    Some gradients, such as that of the keys' bias, are zero except for rounding.
    """
    return float((computed - expected).abs().max() / expected.abs().max().clamp(min=max(1e-30, scale / 1000)))


def furthest(computed: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference over several gradients."""
    scale = max(float(one.abs().max()) for one in expected)
    return max(apart(one, other, scale) for one, other in zip(computed, expected, strict=True))


def train(name: str, folder: Path, mesh: Mapping[str, int]) -> dict[str, Any]:
    """A training step on one mesh: its collectives, and the differences of loss and gradients from transformers'."""
    program = step_programs.micro_program(Setting.of(recipe(folder, mesh)))
    several = architectures.keeps_apart(name)
    values, batch = architectures.values(name), architectures.batch(several)
    loss, grads = architectures.reference(name, batch, several)
    sums = [torch.zeros_like(value) for value in values.values()]
    loss_sum, _, *summed = program.simulate(*values.values(), *sums, *batch.values())
    worst = furthest(summed, list(grads.values()))
    sent = sum(c.bytes for c in program.collectives)
    gathered = sum("has no rule" in warning for warning in program.warnings)
    return {"loss": apart(loss_sum, loss), "gradients": worst, "collective_bytes": sent, "ops_without_rule": gathered}


def serves(name: str, folder: Path) -> float:
    """The difference of a server's logits on two devices from transformers'."""
    loaded = recipe(folder, {})
    setting = ServeSetting.of(loaded, model_to_serve(loaded, "cpu"), "cpu")
    programs = build_serving(setting, [Size(8), *(size for size in setting.sizes if size.chunk)])
    values = architectures.values(name)

    def block(path: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return values[path][tuple(slice(start, start + size) for start, size in zip(starts, sizes))]

    logits = lockstep(programs, Weights({path: tuple(v.shape) for path, v in values.items()}, block))
    own = architectures.own(name)
    parts = sequences_for(setting.chunks if setting.states else None)
    with torch.no_grad():
        each = [torch.func.functional_call(own, values, (torch.from_numpy(part)[None],)).logits[0] for part in parts]
    return apart(logits, torch.cat(each))


def wider(name: str) -> Any:
    """Within this, a class has matrices that GPTQ holds."""
    config = architectures.CONFIGS[name]
    sizes = {key: value for key, value in folders.WIDER.items() if key in config}
    return mock.patch.dict(architectures.CONFIGS, {name: {**config, **sizes}})


def quantize(name: str, place: Path) -> float:
    """How far the logits of its GPTQ folder on two devices are from transformers', with the weights it stands for."""
    with wider(name):
        folder, values = folders.quantized(name, place / f"{name}-gptq")
        programs = programs_of(folder, "serve.mesh.tp=2", "serve.requests=8", "serve.step_tokens=8")
        logits = lockstep(programs, stored_weights(open_source(str(folder))))
        tokens, own = torch.from_numpy(prompts().tokens)[None], architectures.own(name)
        parts = (tokens[:, :5], tokens[:, 5:])
        with torch.no_grad():
            each = [torch.func.functional_call(own, values, (part,)).logits[0] for part in parts]
    return apart(logits, torch.cat(each))


def causal(name: str, place: Path) -> dict[str, Any]:
    """The table row of a causal language model."""
    folder = architectures.folder(place / name, name)
    row: dict[str, Any] = {"name": name, "class": architectures.CONFIGS[name]["architectures"][0]}
    row["plan"] = attempt(lambda: len(training.build(Setting.of(recipe(folder, MESHES[1]))).micro.collectives))
    row["train"] = {" x ".join(mesh): attempt(lambda mesh=mesh: train(name, folder, mesh)) for mesh in MESHES}  # type: ignore[misc]
    row["serve"] = attempt(lambda: serves(name, folder))
    row["gptq"] = attempt(lambda: quantize(name, place)) if not isinstance(row["serve"], dict) else row["serve"]
    row["quantize"] = attempt(lambda: writes(name, place))
    return row


def writes(name: str, place: Path) -> float:
    """How far the loss of the folder that the quantizer writes, by transformers, is from the one that it reports."""
    tokens = torch.randint(0, architectures.VOCAB, (8, 12), generator=torch.Generator().manual_seed(0))
    text = text_rows(tokens, tokens.roll(-1, 1))
    with wider(name):
        architecture, values = Architecture(architectures.config_of(name)), architectures.values(name)
        spec = TransformersModel(architecture.raw)
        job = Quantizer(spec, values.__getitem__, text, text, Settings(group_size=16), "head_local")
        report = write_quantized(job, place / f"{name}-quantized")
        stored = FolderWeights(place / f"{name}-quantized", architecture, architecture.build())
        weights = {path: stored.block(path, (), ()).float() for path in values}
        with torch.no_grad():
            logits = torch.func.functional_call(architectures.own(name), weights, (tokens,)).logits
    assert report.loss_after is not None
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text.batch["targets"].flatten())
    return abs(float(loss) - report.loss_after)


def attempt(what: Callable[[], Any]) -> Any:
    """The result of `what`, or the reason of its error."""
    try:
        return what()
    except (Mistakes, ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
        words = [d.why or d.message for d in error.diagnostics] if isinstance(error, Mistakes) else [str(error)]
        return {"refused": words[0].strip().splitlines()[0]}


# ---- encoders: a step with a user's loss ---------------------------------------------------------------------------
_ATTENTION = ("query.weight", "key.weight", "value.weight", "intermediate.dense.weight")
ENCODERS = {"bert": _ATTENTION, "t5": (".q.weight", ".k.weight", ".v.weight", ".wi.weight"), "vit": _ATTENTION}
"""Families of `models.py`, with the ends of the names of the weights that are annotated."""


def encoder(name: str) -> dict[str, Any]:
    """The table row of an encoder: a step on dp 2 x tp 2, rows of some weights annotated, the rest inferred."""
    step = Program(FAMILIES[name], rows=8, step=True)
    shardings = [("tp",) if path.endswith(ENCODERS[name]) else None for path in step.state]

    def whole() -> dict[str, Any]:
        mesh = Mesh({"dp": 2, "tp": 2})
        program = partition(step, step.args, mesh, in_shardings=[("dp",)] * len(step.inputs) + shardings)
        computed, expected = program.simulate(*step.args), step(*step.args)
        return {
            "loss": apart(computed[0], expected[0]), "gradients": furthest(computed[1:], expected[1:]),
            "collective_bytes": sum(c.bytes for c in program.collectives), "planned": len(program.collectives),
        }  # fmt: skip

    outcome = attempt(whole)
    planned = outcome if "refused" in outcome else outcome["planned"]
    return {"name": name, "class": FAMILIES[name].model, "plan": planned, "train": {"dp x tp": outcome},
            "serve": None, "quantize": None}  # fmt: skip


# ---- the table -----------------------------------------------------------------------------------------------------
def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| `model_type` | class | plan | train: gradients within | serve | GPTQ served | quantize |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        plan, *others = (
            "" if row.get(verb) is None else "no" if isinstance(row[verb], dict) else "yes"
            for verb in ("plan", "serve", "gptq", "quantize")
        )
        cells = [f"`{row['name']}`", f"`{row['class']}`", plan, _train(row["train"]), *others]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _train(meshes: Mapping[str, Any]) -> str:
    if any("refused" in outcome for outcome in meshes.values()):
        return "no"
    worst = max(outcome["gradients"] for outcome in meshes.values())
    return f"{worst:.0e}" + ("" if worst <= BOUND else " (not equal)")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/transformers.md")
    options = parser.parse_args()
    record = Record("gallery", quiet=options.json)
    names = [*architectures.CONFIGS, *ENCODERS]
    with tempfile.TemporaryDirectory() as place:
        for name in options.names or names:
            begun = time.monotonic()
            row = encoder(name) if name in ENCODERS else causal(name, Path(place))
            record.rows.append(row)
            record.say(f"{json.dumps(row)}  {time.monotonic() - begun:.0f} s")
    record.keep_others(names)
    close_with_table(record, table(record.rows), "transformers.md", options)


if __name__ == "__main__":
    main()
