"""Recipes that `tpshard validate` refuses."""

from __future__ import annotations

from mistake_sample import Sample

QWEN = (
    '{"model_type": "qwen2", "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128,\n'
    ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}'
)
"""The text of a config.json."""

TEXTS = (
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
    "model: {preset: tiny}\nfsdp: {axis: [fsdp, fsdp]}",
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
    "model: {preset: tiny}\ntask: frames",
    "model: {preset: tiny, rope_scaling: {factor: 8, low_freq_factor: 4}}",
    "model: {preset: tiny, layers: 4}\nremat: {every: 8}",
    "model: {preset: tiny}\ntrain: {steps: 100, profile: {steps: [12, 10]}}",
    "model: {preset: tiny}\ntrain: {steps: 100, profile: {steps: [110, 120]}}",
    "model: {preset: tiny}\ntrain: {steps: 100, tokens: 1000000}",
    "model: {preset: tiny}\ntrain: {steps: 100}\ndata: {epochs: 3}",
    "model: {preset: tiny}\nschedule: {stages: [{to: 0.5}]}",
    "model: {preset: tiny}\ntrain: {steps: 100}\nschedule: {stages: [{steps: 200, to: 0.5}, {steps: 100, to: 0}]}",
    "model: {preset: tiny}\ndata: {prompt: question}",
    "model: {preset: tiny}\ndata: {messages: talk, prompt: question, completion: answer}",
    "model: {preset: tiny}\ndata: {source: a.jsonl, messages: talk, tokenizer: bytes}",
    "model: {preset: tiny}\ndata: {sources: []}",
    "model: {preset: tiny}\ndata: {sources: [{source: a.jsonl, weight: 0}]}",
    "model: {preset: tiny}\ndata: {sources: [{source: a.jsonl}, {source: b.jsonl, weight: 0}]}",
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
    "model: {preset: tiny}\nrun: {dir: 's3a://bucket/runs'}",
    "model: {preset: tiny}\ndata: {source: 's3://bucket/texts'}",
    "model: {preset: tiny}\noptimizer: {lr: 0, groups: [{match: norm.weight, lr: 1.0e-3}]}",
    "model: {preset: tiny}\noptimizer: {groups: [{match: norm.weight}]}",
    "model: {module: 'tpshard.models.conformer:Conformer', args: {features: 32, classes: 16}}\n"
    "task: frames\nloss: {chunks: 2}",
    "model: {preset: tiny}\nloss: {chunks: 3}",
    "model: {preset: tiny}\ntask: 'tpshard.models.objectives.tasks:LanguageModel'\nloss: {z_loss: 1.0e-4}",
    "model: {preset: tiny}\nname: tiny\nserve: {adapters: {tiny: 'org/adapter'}}",
    "model: {preset: tiny}\nserve: {adapters: {a: one, b: two}, max_loras: 1}",
    "model: {preset: tiny}\nadapters: {packed: true}",
    "model: {preset: tiny, dtype: fp8, seq_len: 100}",
    "model: {preset: tiny, dtype: fp8}\nmesh: {tp: 2}",
    "model: {preset: tiny, dtype: fp8}\nmesh: {pp: 2}\npipeline: {schedule: gpipe, form: vectorized}",
)

FILES = (
    Sample(
        "model: {module: 'mine:Model', args: {api_key: '***'}}",
        files={
            "mine.py": "from torch import nn\n\n\nclass Model(nn.Embedding):\n"
            "    def __init__(self, api_key):\n        super().__init__(2, 2)\n\n"
            "    def forward(self, tokens, documents=None, positions=None):\n        return super().forward(tokens)\n"
        },
    ),
    Sample(command="validate tinny"),
    Sample(command="validate tiny train..steps=3"),
    Sample(command="validate tiny train.steps.more=3"),
    Sample("model: {preset: tiny}\nname: \x07"),
    Sample("model: {preset: tiny}\nname: tiny".encode("utf-16")),
    Sample(b"\xef\xbb\xbfmodel: {preset: tiny}"),
    Sample(b"model: {preset: tiny}\nname: \xff"),
    Sample(b"model: {preset: tiny}" + b"\n" * 2**20),
    Sample("a: &a " + str([1] * 80) + "\nb: &b [" + "*a, " * 16 + "*a]\nmodel: [" + "*b, " * 16 + "*b]"),
    Sample(
        f"model: {{preset: tiny}}\nname: {'${seed}' * 7}\ndata: {{source: '{'${name}' * 7}'}}\n"
        f"run: {{dir: '{'${data.source}' * 7}'}}\nserve: {{host: '{'${run.dir}' * 7}'}}"
    ),
    Sample("model: {preset: tiny, vocab: 1000}"),
    Sample("model: {preset: tiny}\ndata: {tokenizer: organization/name}"),
    Sample("model: {preset: tiny}\ndata: {tokenizer: /shared/tokenizer}"),
    Sample("model: {preset: tiny}\ndata: {tokenizer: {train: 8192}}"),
    Sample("model: {preset: tiny}\ndata: {tokenizer: 8192}"),
    Sample("model: {hf: folder, full_layers: [1]}", files={"folder/config.json": QWEN}),
)
"""Mistakes in a recipe's bytes, in an override, and in a file that it names."""

SAMPLES = (*map(Sample, TEXTS), *FILES)
