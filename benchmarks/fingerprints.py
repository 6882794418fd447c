"""Fingerprints of programs and plans: every shipped recipe, its variants, and twenty classes of transformers.

    python benchmarks/fingerprints.py [--record] [--quick] [NAME ...]       NAME is a case, or the part of it before `:`

A row per case: a hash of each program's fingerprint, of `plan --json` and of the plan's screen, or the first words of
the refusal. A change of any program, price or text is a line of the record's diff; a move of code changes none. The
names of changed rows are printed. `tests/benchmarks/test_fingerprints.py` compares the cases of `--quick`.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.plan import outputs, planner
from tpshard.plan.report import screen
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import load, loads

from record import ROOT, Record, parser_of
from record import load as load_record

sys.path.insert(0, str(ROOT / "tests"))
import architectures
import gptq_folders

FOR = ("train", "prefill", "decode")
SHIPPED = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
SMALL = """
name: small
cluster: {device: h100-sxm-80g, nodes: 1, devices_per_node: 4}
model: {MODEL}
mesh: {MESH}
batch: {global_sequences: 32, per_device: 4}
serve: {mesh: {tp: 2}}
"""
STAGED = "pp: 2, fsdp: 2"
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "one device": ("fsdp: 1", "cluster.devices_per_node=1"),
    "replicas": ("dp: 2, fsdp: 2",),
    "sequence parallel": ("sharding.annotate={'layers.*.residual': [batch, seq_sp, embed]}",
                          "sharding.rules.seq_sp=tp"),
    "padded": ("tp: 3", "cluster.devices_per_node=3", "sharding.on_uneven=pad"),
    "layers apart": ("sharding.annotate={'layers.1.mlp.up.weight': [null, mlp]}",),
    "gathered once": ("fsdp.accumulate.gather=step",),
    "reduced last": ("fsdp.accumulate.reduce=last",),
    "remat full": ("remat=full",),
    "remat none": ("remat=none",),
    "muon": ("optimizer={name: muon, lr: 0.01}",),
    "lion": ("optimizer={name: lion, lr: 0.001}",),
    "fp8": ("fsdp: 4", "model.dtype=fp8", "model.width=256", "model.head_dim=64", "model.mlp=512", "model.seq_len=128"),
    "experts": ("ep: 2, tp: 2", "model.preset=tiny-moe"),
    "gpipe": (STAGED, "batch.per_device=2", "pipeline={schedule: gpipe}"),
    "1f1b": (STAGED, "batch.per_device=2", "pipeline={schedule: 1f1b}"),
    "circular": (STAGED, "batch.per_device=2", "pipeline={schedule: circular}"),
    "interleaved": (STAGED, "batch.per_device=2", "pipeline={schedule: interleaved_1f1b}"),
    "zero bubble": (STAGED, "batch.per_device=2", "pipeline={schedule: zero_bubble}"),
    "vectorized": (STAGED, "batch.per_device=2", "pipeline={schedule: gpipe, form: vectorized}"),
}  # fmt: skip
"""The mesh, where it is not MESH, and changes of SMALL."""
MODEL, MESH = "preset: tiny, layers: 8, seq_len: 64", "fsdp: 2, tp: 2"
RECURRENT = ("mamba", "falcon_h1", "qwen3_next")
CLASSES = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "gpt2", "gpt_neox",
           "falcon", "bloom", "mpt", "stablelm", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v32",
           "llama4_text")  # fmt: skip
QUANTIZED = ("llama", "mixtral")
LAYOUTS = ("naive", "local_sort", "tp_aware")

MODULES = ("conformer", "encoder", "unet")
"""Shipped recipes whose module has few layers as it is; of others four are planned, of which some are alike."""


@dataclass(frozen=True)
class Case:
    """A recipe's plan. `folder` makes the folder of a model in a place of its own, whose path the row hides."""

    what: str
    recipe: Callable[[str], Recipe]
    folder: Callable[[Path], object] | None = None

    def row(self, name: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as place:
            folder = str(Path(place, "model"))
            if self.folder is not None:
                self.folder(Path(folder))
            try:
                plan = planner.planned(self.recipe(folder), name, self.what)
                report = plan.report
            except Mistakes as mistakes:
                words = [entry.message.replace(folder, "FOLDER") for entry in mistakes.diagnostics]
                return {"name": name, "exit": int(mistakes.exit), "refused": words}
            listed = {f"{row['rows']} rows{' of a chunk' * row.get('chunk', 0)}": row["fingerprint"]
                      for row in report.programs}  # fmt: skip
            texts = {"json": outputs.dumps(report.to_json()), "screen": screen.screen(report)}
            # Lines break where a path's length says: words alone are compared.
            texts = {form: " ".join(text.replace(folder, "FOLDER").replace(str(ROOT), "").split())
                     for form, text in texts.items()}  # fmt: skip
            return {
                "name": name,
                "programs": {key: digest[:16] for key, digest in (listed or plan.fingerprints).items()},
                **{form: _hash(text) for form, text in texts.items()},
            }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shipped(name: str, changes: tuple[str, ...], _: str) -> Recipe:
    return load(name, ["data.tokenizer=tokenizer", *changes])


def _small(changes: tuple[str, ...], model: str, folder: str) -> Recipe:
    meshes = [change for change in changes if "=" not in change]
    text = SMALL.replace("{MODEL}", f"{{{model}}}").replace("{MESH}", f"{{{(meshes or [MESH])[0]}}}")
    overrides = [change for change in changes if "=" in change]
    return loads(text.replace("FOLDER", folder), [change.replace("FOLDER", folder) for change in overrides])


def _class(name: str, what: str) -> Case:
    recipe = partial(_small, (), "transformers: FOLDER, seq_len: 16")
    return Case(what, recipe, partial(architectures.folder, name=name))


def _quantized(name: str, layout: str) -> Case:
    changes = ("serve.checkpoint=FOLDER", f"serve.layout={layout}")
    return Case("decode", partial(_small, changes, MODEL), partial(_write_quantized, name))


def _write_quantized(name: str, place: Path) -> None:
    with mock.patch.dict(architectures.CONFIGS, {name: architectures.config_of(name) | gptq_folders.WIDER}):
        gptq_folders.quantized(name, place)


def cases() -> Iterator[tuple[str, Case]]:
    for name in SHIPPED:
        yield from ((f"{name}: {what}", Case(what, partial(_shipped, name, ()))) for what in FOR)
        few = () if name in MODULES else ("model.layers=4",)
        yield f"few layers: {name}", Case("train", partial(_shipped, name, few))
    for name, changes in VARIANTS.items():
        yield f"variant: {name}", Case("train", partial(_small, changes, MODEL))
    for name in dict.fromkeys((*CLASSES, *RECURRENT)):
        yield from ((f"class: {name}, {what}", _class(name, what)) for what in ("train", "decode"))
    for name in QUANTIZED:
        yield from ((f"quantized: {name}, {layout}", _quantized(name, layout)) for layout in LAYOUTS)


CASES = dict(cases())
QUICK = [
    *(name for name in CASES if name.startswith("few layers")),
    *(f"variant: {name}" for name in ("reduced last", "1f1b")),
    *(f"class: {name}, train" for name in CLASSES[-10:]),
    "class: llama, decode",
    "quantized: llama, tp_aware",
]
"""The cases that a test compares, in seconds."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="only the cases that a test compares")
    options = parser.parse_args()
    record = Record("fingerprints", quiet=options.json)
    try:
        before = {row["name"]: row for row in load_record("fingerprints")["rows"]}
    except FileNotFoundError:
        before = {}
    for name, case in CASES.items():
        if options.names and not {name, name.partition(":")[0]} & set(options.names):
            continue
        if options.quick and name not in QUICK:
            continue
        row = case.row(name)
        record.rows.append(row)
        old = before.get(name, {})
        parts = [key for key in row if row[key] != old.get(key)]
        record.say(f"{name}: {', '.join(parts) if name in before else 'new'}" if parts else f"{name}: as recorded")
    record.keep_others(CASES)
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
