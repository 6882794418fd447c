"""Sample mistakes, and what tpshard prints of them.

A sample is a recipe, a command, and the files that the command reads. It runs in an empty folder, in this process.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diagnostic_entries import entries
from tpshard.cli.main import run

VALIDATE = "validate recipe.yaml"


@dataclass(frozen=True)
class Sample:
    """A recipe, the command that refuses it, and other files. Each is short enough to be read at a glance."""

    recipe: str | bytes = ""
    command: str = VALIDATE
    files: Mapping[str, str | bytes] = field(default_factory=dict)


RECIPES = (
    "modle: {preset: tiny}",
    "model: {preset: tiny, hf: folder}",
    "model: {preset: null}",
    "model: {preset: tiny, args: {width: 8}}",
    "model: {preset: tiny, dims: {head.weight: [vocab, embed]}}",
    "model: {transformers: folder, layers: 4}",
    "model: {preset: tiny}\noptimizer: {lr: -1}",
    "model: {preset: tiny}\ntrain: {steps: [100]}",
    "model: {preset: tiny}\ntrain: {steps: fast}",
    "model: {preset: tiny}\ncompile: jit",
    "model: {preset: tiny}\noptimizer: {lr: .inf}",
    "model: {preset: tiny}\noptimizer: {betas: [0.9]}",
    "model: {preset: tiny}\nfsdp: {bucket: {size: 4}}",
    "model: {preset: tiny}\nmodel: {preset: 1b}",
    "model: {preset: tiny}\non: {lr: 1}",
    "model: {preset: tiny}\n<<: {name: base}",
    "model: {preset: tiny}\n1: one",
    "model: {preset: tiny}\n\tname: a",
    "model: {preset: tiny}\n---\nmodel: {preset: 1b}",
    "model: [preset: tiny",
    "model: {preset: tiny}\nmesh: {fsdp: -1, tp: -1}",
    "model: {preset: tiny}\nmesh: {fsdp: 4, tp: 2}\ncluster: {device: h100-sxm-80g, devices_per_node: 4, nodes: 1}",
    "model: {preset: tiny}\nmesh: {fsdp: 2}\nsharding: {rules: {mlp: tpp}}",
    "model: {preset: tiny}\nmesh: {fsdp: 2, expert: 4}",
    "model: {preset: tiny}\nsharding: {rules: {mpl: tp}}",
    "model: {preset: tiny}\nsharding: {priority: {embed: 1}}",
    "model: {preset: tiny}\nsharding: {annotate: {tokens: [batch, frames]}}",
    "model: {preset: tiny}\nsharding: {rules: {mlp: [tp, tp]}}",
    "model: {preset: tiny}\nsharding: {pin: {output.weight: [tp, tp]}}",
    "model: {preset: tiny}\nmesh: {tp: 2}\nsharding: {rules: {mlp: tp}, annotate: {output.weight: [mlp, mlp]}}",
    "model: {preset: tiny}\nmesh: {tp: 2}\nsharding: {rules: {embed: tp, mlp: tp}}",
    "model: {preset: tiny}\nsharding: {annotate: {hidden.weight: [mlp, null]}}",
    "model: {preset: tiny}\nsharding: {annotate: {output.weight: [mlp]}}",
    "model: {preset: tiny}\nmesh: {fsdp: 3}",
    "model: {preset: tiny}\nmesh: {fsdp: 2}\nbatch: {global_sequences: 8, per_device: 3}",
    "model: {preset: tiny}\nmesh: {tp: 3}",
    "model: {preset: tiny}\nmesh: {tp: 8}",
    "model: {preset: granite-tiny, seq_len: 100000}",
    "model: {preset: tiny}\nschedule: {warmup_steps: 500}\ntrain: {steps: 100}",
    "model: {preset: tiny}\noptimizer: {name: lion, momentum: 0.9}",
    "model: {preset: tiny-moe, experts: 8, top_k: 99}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: gpipe, form: vectorized}\n"
    "sharding: {rules: {stage: tp}}",
    "model: {preset: tiny}\npipeline: {schedule: 1f1b}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b}\n"
    "sharding: {rules: {stage: pp}, annotate: {norm.weight: [stage]}}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b, stages: 4}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b, rounds: 2}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b}\nsharding: {rules: {mlp: pp}}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b, form: vectorized}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: gpipe, form: vectorized, split: [1, 3]}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b, split: [1, 2]}",
    "model: {preset: tiny}\nmesh: {pp: 8}\npipeline: {schedule: 1f1b}",
    "model: {preset: tiny}\nname: ${train.stepz}",
    "model: {preset: tiny}\nname: ${run.dir}\nrun: {dir: '${name}'}",
    "model: {preset: tiny}\ntrain: {steps: '${oc.env:NAME_OF_NO_VARIABLE}'}",
    "model: {preset: tiny}\ntrain: {steps: '???'}",
    "model: {preset: tiny}\nname: '${oc.create:{}}'",
    "model: {preset: tiny}\n${name}: 1",
    "extends: no-such-recipe",
    "extends: [a, b]",
    "extends: recipe.yaml",
    "extends: ./base.yaml",
    "schema: 99\nmodel: {preset: tiny}",
    "schema: one\nmodel: {preset: tiny}",
    "schema: 0\nmodel: {preset: tiny}",
    "- tiny",
    "# nothing",
    "model: *base",
    "model: &a {preset: *a}",
    "model: !!python/name:os.system {}",
    "model: {preset: tiny}\n[name]: a",
    "model: " + "[" * 42,
    "extends: /etc/base.yaml",
    "model: {preset: tiny}\nname: '${oc.decode:${seed}}'",
    "model: {preset: tiny, heads: 8, kv_heads: 3}",
    "model: {preset: tiny, head_dim: 5}",
    "model: {preset: tiny, experts: 4}",
    "model: {preset: tiny-moe, dtype: fp8}",
    "model: {preset: tiny, dtype: fp8, seq_len: 100}",
    "model: {preset: tiny, dtype: fp8}\nmesh: {tp: 2}",
    "model: {preset: tiny, dtype: fp8}\nmesh: {pp: 2}\npipeline: {schedule: gpipe, form: vectorized}",
)
"""Recipes with mistakes that `tpshard validate` reports."""

COMMANDS = (
    # files
    Sample("extends: ./1.yaml", files={f"{n}.yaml": f"extends: ./{n + 1}.yaml" for n in range(1, 17)}),
    Sample(command="validate tinny"),
    Sample(command="validate tiny train..steps=3"),
    Sample(command="validate tiny train.steps.more=3"),
    Sample("model: {preset: tiny}\nname: \x07"),
    Sample("model: {preset: tiny}\nname: tiny".encode("utf-16")),
    Sample(b"\xef\xbb\xbfmodel: {preset: tiny}"),
    Sample(b"model: {preset: tiny}\nname: \xff"),
    Sample(b"model: {preset: tiny}" + b"\n" * 2**20),
    # commands
    Sample(command="check tiny --against mesh.tp=1"),
    Sample(command="check tiny --against model.layers=2"),
    Sample(command="check tiny --against batch.global_sequences=16"),
    Sample(command="convert tiny out --tokenizer nowhere"),
    Sample(command="convert tiny out"),
    Sample(command="plan tiny --dry-run --html ."),
    Sample(command="quantize model.pt out"),
    Sample(
        command="quantize model out", files={"model/config.json": '{"quantization_config": {"quant_method": "awq"}}'}
    ),
    Sample(command="recipes cp tinny"),
    Sample(command="recipes cp tiny ../nowhere/tiny.yaml"),
    Sample(command="recipes keys trian"),
    Sample(command="serve tiny serve.checkpoint=nowhere"),
    Sample(command="serve tiny serve.host=0.0.0.0"),
    Sample(command="serve tiny --api-key-file nowhere"),
    Sample(command="serve tiny --api-key-file key", files={"key": " "}),
    Sample(command="convert model out train.steps=3", files={"model/config.json": "{}"}),
    Sample(command="convert model out", files={"model/config.json": "{}"}),
    Sample("model: {preset: tiny, vocab: 1000}"),
    Sample("model: {preset: tiny}\ndata: {tokenizer: organization/name}"),
)
"""Mistakes that other commands report, or that need a file."""

SAMPLES = (*map(Sample, RECIPES), *COMMANDS)


def printed(sample: Sample) -> list[tuple[str, str]]:
    """(message, whole text) of every diagnostic that the sample's command prints."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, content in {"recipe.yaml": sample.recipe, **sample.files}.items():
            if content:
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                Path(name).write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            run(shlex.split(sample.command))
        text = said.getvalue().replace(f"{Path(folder).resolve()}", "/home/me")
    return list(_blocks(text))


BLOCK = re.compile(r"(?m)^(?:error|warning): (.*)\n(?:(?:  |\d+ \|| +\|).*\n)*")


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    return ((block[1], block[0]) for block in BLOCK.finditer(text))


def samples() -> dict[str, tuple[Sample, str]]:
    """Message template -> (sample, what is printed): the first sample that shows it."""
    shown: dict[str, tuple[Sample, str]] = {}
    listed = entries()
    for sample in SAMPLES:
        for message, text in printed(sample):
            fitting = [entry for entry in listed if entry.fits(message)]
            entry = max(fitting, key=lambda entry: len(entry.message), default=None)
            if entry is not None:
                shown.setdefault(entry.message, (sample, text))
    return shown
