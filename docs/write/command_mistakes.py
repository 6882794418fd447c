"""Mistakes that commands other than `validate` report: `plan`, `check`, `serve`, `quantize`, `convert` and others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from device_mistakes import DEVICE
from mistake_sample import Sample
from recipe_mistakes import QWEN
from tpshard.train.checkpoints.checkpoint import FORMAT, VERSION, manifest_sum

PLAN = "plan recipe.yaml --dry-run"
DECODE = f"{PLAN} --for decode"
CHECKPOINT = "runs/recipe/checkpoints/step-000005"

NET = """from torch import nn


class Net(nn.Module):
    dims = {"table.weight": ("vocab", "embed"), "out.weight": ("vocab", "embed")}

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 8)
        self.out = nn.Linear(8, 64, bias=False)

    def forward(self, tokens, documents=None, positions=None):
        return self.out(self.table(tokens))"""
"""The source of a user's module."""
BRANCH = NET.replace("        return", "        if tokens.max() > 60:\n            tokens = tokens - 1\n        return")
UNNAMED = NET.replace("vocab", "words")
BUCKETS = "model: {preset: tiny, layers: 1}\nfsdp: {bucket: {file: buckets.json}}"
VECTORIZED = "pipeline: {schedule: gpipe, form: vectorized}"
TOKENIZER = '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}'
ENDED = {"tok/tokenizer.json": TOKENIZER, "tok/tokenizer_config.json": '{"eos_token": "a"}'}
"""The files of a tokenizer's folder `tok`, by path."""
LARGE = TOKENIZER.replace('"b": 1', '"b": 1, "c": 300')
SHORT = " --text texts --seq-len 2 quantize.calibration.sequences=1 evaluate.sequences=1"
MANY_ROWS = "\n".join(f'{{"text": "{"ab" * n}"}}' for n in range(1, 200))
ROWS = "\n".join('{"text": "ab"}' for _ in range(3))


def plan_of_net(recipe: str, net: str = NET) -> Sample:
    """A plan of a user's module in net.py."""
    return Sample(recipe, PLAN, {"net.py": net})


def quantized(options: str, files: dict[str, str]) -> Sample:
    """The quantization of a small model with a tokenizer."""
    return Sample(command=f"quantize model out data.tokenizer=tok{options}", files=files, model=True)


def converted(meta: dict[str, object], files: Mapping[str, str] = MappingProxyType({})) -> Sample:
    """The conversion of a checkpoint without tensors, whose manifest holds `meta`."""
    manifest: dict[str, object] = {
        "format": FORMAT, "version": VERSION, "step": 5, "world": 1, "meta": meta, "files": {},
        "tensors": {},
    }  # fmt: skip
    text = json.dumps({**manifest, "sha256": manifest_sum(manifest)})
    return Sample(command=f"convert {CHECKPOINT} out", files={f"{CHECKPOINT}/manifest.json": text, **files})


PLANS = (
    plan_of_net("model: {module: 'net:Net'}", BRANCH),
    plan_of_net("model: {module: 'net:Net'}\nsharding: {annotate: {head.weight: [vocab, null]}}"),
    plan_of_net("model: {module: 'net:Net'}\nsharding: {annotate: {table.weight: [vocab]}}"),
    plan_of_net("model: {module: 'net:Net', dims: {tabel.weight: [vocab, embed]}}"),
    plan_of_net("model: {module: 'net:Net', dims: {table.weight: [vocab]}}"),
    plan_of_net("model: {module: 'net:Net'}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b}"),
    plan_of_net("model: {module: 'net:Net'}\noptimizer: {name: muon}"),
    plan_of_net("model: {module: 'net:Net'}\nmesh: {tp: 3}\nsharding: {rules: {embed: tp}}"),
    Sample("model: {preset: tiny}\nbatch: {global_sequences: 8, per_device: 3}", PLAN),
    Sample(
        "model: {preset: tiny}\nmesh: {pp: 2}\nbatch: {global_sequences: 8}\n"
        "pipeline: {schedule: 1f1b, micro_batches: 3}",
        PLAN,
    ),
    Sample(
        "model: {preset: tiny}\nmesh: {dp: 3, tp: 2}\nbatch: {global_sequences: 6}\n"
        "sharding: {rules: {vocab: [dp, tp]}}",
        PLAN,
    ),
    Sample(BUCKETS, PLAN),
    Sample(BUCKETS, PLAN, {"buckets.json": '{"norm.weight": 1}'}),
    Sample(BUCKETS, PLAN, {"buckets.json": '[["nrom.weight"]]'}),
    Sample(
        "model: {preset: tiny, layers: 1}\nmesh: {tp: 2}\n"
        "sharding: {on_reshard: error, pin: {logits: [null, null, null]}}",
        PLAN,
    ),
    Sample("model: {preset: tiny, kv_heads: 8, dtype: fp8}\ncluster: {device: a100-80g}", PLAN),
    Sample(f"model: {{preset: tiny-moe}}\nmesh: {{pp: 2}}\n{VECTORIZED}", PLAN),
    Sample(f"model: {{preset: tiny, layers: 6}}\nmesh: {{pp: 4}}\n{VECTORIZED}", PLAN),
    Sample(
        f"model: {{hf: folder}}\nmesh: {{pp: 2}}\n{VECTORIZED}",
        PLAN,
        {
            "folder/config.json": QWEN.replace(
                "{", '{"sliding_window": 64, "use_sliding_window": true, "max_window_layers": 1,\n '
            )
        },
    ),
    Sample("model: {preset: tiny, layers: 1}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b}", PLAN),
    Sample("model: {preset: tiny, layers: 1}", f"{PLAN} --skew 2"),
    Sample("model: {preset: tiny-moe, layers: 2}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b}", f"{PLAN} --skew 2"),
    Sample("model: {preset: tiny-moe, layers: 1}", f"{PLAN} --skew 20"),
    Sample(command="plan tiny --dry-run --html ."),
    Sample(
        command="plan --check run",
        files={
            "run/metrics.jsonl": '{"step": 5, "eval_loss": 3.2}',
            "run/recipe.yaml": "model: {preset: tiny, layers: 1}",
        },
    ),
    Sample(command="check tiny --against mesh.tp=1"),
    Sample(command="check tiny --against model.layers=2"),
    Sample(command="check tiny --against batch.global_sequences=16"),
    Sample(command="check tiny --against task=mlm"),
    Sample("model: {module: 'net:Net'}", "check recipe.yaml --against fsdp.bucket=none", {"net.py": UNNAMED}),
)
"""Mistakes that `plan` and `check` report."""

SERVERS = (
    Sample("model: {preset: tiny, kv_heads: 8, dtype: fp8}", DECODE),
    Sample("model: {preset: tiny}\ntask: mlm", DECODE),
    Sample("model: {preset: tiny}\nserve: {mesh: {tp: 3}}", DECODE),
    Sample("model: {preset: tiny}\nserve: {mesh: {dp: 2}}", DECODE),
    Sample("model: {preset: tiny, layers: 1}", f"{PLAN} --for serve --rate 2 --prompt 300 --answer 20"),
    Sample(
        "model: {preset: tiny, layers: 1}\ncluster: {device: mine.yaml}\nserve: {mesh: {tp: 1}, cache_mb: 4096}",
        f"{PLAN} --for serve --rate 2 --prompt 8 --answer 8",
        {"mine.yaml": DEVICE.replace("80 GiB", "1 GiB")},
    ),
    Sample(command="serve tiny serve.checkpoint=nowhere"),
    Sample(command="serve tiny serve.host=0.0.0.0"),
    Sample(command="serve tiny --api-key-file nowhere"),
    Sample(command="serve tiny --api-key-file key", files={"key": " "}),
)
"""Mistakes that `serve` and plans of servers report."""

FOLDERS = (
    Sample(command="convert tiny out --tokenizer nowhere"),
    Sample(command="convert tiny out"),
    Sample(command="convert model out run.dir=x", files={"model/config.json": "{}"}),
    Sample(command="convert model out", files={"model/config.json": "{}"}),
    Sample(command="convert model .. --overwrite", model=True),
    Sample(command="convert model /dev/null/out", model=True),
    Sample("model: {preset: tiny}", "convert recipe.yaml out", {f"{CHECKPOINT}/manifest.json": "{}"}),
    Sample(command=f"convert {CHECKPOINT} out", files={f"{CHECKPOINT}/manifest.json": "{}"}),
    converted({}),
    converted({"model": {"module": "net:Net", "args": {}}}),
    converted({}, {"runs/recipe/recipe.yaml": "model: {preset: tiny}"}),
    Sample(command="quantize model.pt out"),
    Sample(command="quantize model out", model=True),
    Sample(command="quantize model model --overwrite", model=True),
    quantized("", {"tok/tokenizer.json": TOKENIZER}),
    quantized("", {**ENDED, "tok/tokenizer.json": LARGE}),
    quantized(" --text texts", {**ENDED, "texts/a.md": ROWS}),
    quantized(" --text texts/*", {**ENDED, "texts/a.csv": ROWS}),
    quantized(" --text texts", {**ENDED, "texts/a.jsonl": ROWS, "texts/b.txt": ROWS}),
    quantized(" --text texts", {**ENDED, "texts/a.json.gz": "a\nb"}),
    quantized(" --text texts data.bad_rows=1", {**ENDED, "texts/a.json.gz": "a\nb"}),
    quantized(" --text texts", {**ENDED, "texts/a.json.gz": b"no gzip"}),
    quantized(f"{SHORT} quantize.group_size=24", {**ENDED, "texts/a.json.gz": MANY_ROWS}),
)
"""Mistakes that `convert` and `quantize` report."""

OTHERS = (
    Sample(command="train tiny --plan nowhere"),
    Sample(command="train tiny --plan plan.json", files={"plan.json": "{}"}),
    Sample(
        command="train tiny --plan plan.json",
        files={"plan.json": '{"schema": 1, "recipe": "", "plan": {}, "programs": {}}'},
    ),
    Sample("model: {preset: tiny}\nmesh: {fsdp: 2}\ncluster: {device: cpu, nodes: 2}", "train recipe.yaml"),
    Sample(command="recipes cp tinny"),
    Sample(command="recipes cp tiny", files={"tiny.yaml": "model: {preset: tiny}"}),
    Sample(command="recipes cp tiny ../nowhere/tiny.yaml"),
    Sample(command="recipes keys trian"),
)
"""Mistakes that `train` and `recipes` report."""

SAMPLES = (*PLANS, *SERVERS, *FOLDERS, *OTHERS)
