"""Other trainers' configurations become recipes that say the same, with each value's line, and what cannot be said."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from foreign_files import ACCELERATE, names, translated
from tpshard.cli.main import run
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.recipes.foreign.recipe_text import text_of
from tpshard.recipes.foreign.tools import TOOLS
from tpshard.recipes.foreign.translation import Translation, translate
from tpshard.recipes.reading.load import loads
from tpshard.recipes.settings import shell_flags
from tpshard.recipes.settings.stated import Unknown

TITAN = """\
[model]
name = "llama3"
flavor = "8B"

[training]
batch_size = 2          # its older name
seq_len = 4096
steps = 900

[parallelism]
tensor_parallel_degree = 2
context_parallel_degree = 2

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[colours]
sky = "blue"
"""
SCRIPT = """\
#!/bin/bash
GPUS=8
NODES=${SLURM_NNODES:-2}
KIND=dense
OPTIONS=()
ARGS="
    --num-layers 24 --hidden-size 2048
    --num-attention-heads 16
"
MORE=(
    --seq-length 2048      # tokens
    --micro-batch-size 2 --global-batch-size $(( NODES * 32 ))
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --train-iters 1000 --lr-warmup-iters 50
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --vocab-size 32000
)
if [ "$KIND" == moe ]; then
    MORE+=(--num-experts 8)
else
    MORE+=(--untie-embeddings-and-output-weights)
fi
torchrun --nproc_per_node $GPUS --nnodes $NODES pretrain_gpt.py $ARGS ${MORE[@]} --bf16 \\
    --tensor-model-parallel-size 2 --sequence-parallel \\
    --use-distributed-optimizer \\
    --data-path $(touch made) --init-method-std 0.01
"""
AXOLOTL = """\
base_model: NousResearch/Meta-Llama-3.1-8B
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj, v_proj]
learning_rate: 0.0002
max_steps: 200
warmup_ratio: 0.1
gradient_checkpointing: true
sample_packing: true
val_set_size: 0
"""
INPUTS = {"torchtitan": TITAN, "megatron": SCRIPT, "axolotl": AXOLOTL, "accelerate": ACCELERATE}
DEFAULTS = (
    "seed", "mesh", "model.seq_len", "model.dtype", "fsdp.axis", "fsdp.param_dtype", "fsdp.master_dtype",
    "fsdp.reduce_dtype", "fsdp.accumulate", "fsdp.bucket", "optimizer.state_dtype", "remat", "compile",
    "batch.global_sequences", "batch.per_device", "optimizer.name", "optimizer.lr", "optimizer.betas", "optimizer.eps",
    "optimizer.weight_decay", "schedule", "train.steps", "train.clip_grad_norm",
)  # fmt: skip
"""What every recipe says, whatever the file leaves out."""


def test_torchtitan() -> None:
    translation, text = translated("torchtitan", TITAN, cluster__nodes=2, cluster__devices_per_node=8)
    recipe = loads(text)
    assert dict(recipe.mesh) == {"dp": 1, "fsdp": 4, "cp": 2, "tp": 2}
    assert recipe.fsdp.axes == ("fsdp", "cp")
    assert (recipe.batch.global_sequences, recipe.batch.per_device, recipe.model.seq_len) == (8, 2, 4096)
    assert recipe.remat == ("attention", "wq", "wv", "gate", "down")
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.compile) == (8e-4, (0.9, 0.95), "eager")
    assert (recipe.schedule.name, recipe.schedule.warmup_steps, recipe.schedule.min_lr_ratio) == ("linear", 200, 0)
    assert recipe.optimizer.groups[0].weight_decay == 0.1  # its optimizers decay norms too
    assert "# line 7: training.seq_len = 4096" in text
    assert [(one.key, one.where.line) for one in translation.left if one.where] == [("colours.sky", 19)]


def test_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables, arrays, sums and conditions of known texts are put in; nothing is run."""
    monkeypatch.chdir(tmp_path)
    translation, text = translated("megatron", SCRIPT)
    recipe = loads(text)
    assert dict(recipe.mesh) == {"dp": 1, "fsdp": 8, "tp": 2}
    model = recipe.model
    assert (model.layers, model.width, model.mlp, model.vocab, model.experts) == (24, 2048, 5440, 32000, None)
    assert (model.tie_embeddings, model.dtype) == (False, "bf16")
    assert recipe.batch.global_sequences == 64
    assert (recipe.optimizer.betas, recipe.optimizer.weight_decay, recipe.schedule.min_lr_ratio) == (
        (0.9, 0.999),
        0.01,
        0.1,
    )
    assert recipe.fsdp.accumulate.gather == "step"
    assert "# line 7: --num-layers = 24" in text
    assert {"--init-method-std", "--data-path", "--attention-dropout"} <= names(translation)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("shared", "left"), [("", set()), ("64", {"--moe-shared-expert-intermediate-size"})])
def test_megatron_s_whole_experts_are_over_tp_too(shared: str, left: set[str]) -> None:
    """Beside --expert-tensor-parallel-size 1 no expert is cut, and ranks of tp hold experts of their own."""
    flags = (
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --sequence-parallel --num-experts 8 "
        "--expert-tensor-parallel-size 1 --use-distributed-optimizer --ffn-hidden-size 64 --hidden-size 64 --swiglu"
    )
    more = f" --moe-shared-expert-intermediate-size {shared}" if shared else ""
    translation, text = translated("megatron", f"torchrun --nproc-per-node 16 x.py --num-layers 2 {flags}{more}")
    recipe = loads(text)
    assert dict(recipe.mesh) == {"dp": 1, "fsdp": 4, "ep": 2, "tp": 2}
    assert recipe.sharding.rules["expert"] == ("ep", "tp") and "mlp" not in recipe.sharding.rules
    assert {name for name in names(translation) if "expert" in name} == left


def test_axolotl() -> None:
    translation, text = translated("axolotl", AXOLOTL, cluster__devices_per_node=4)
    recipe = loads(text)
    lora = recipe.adapters.lora
    assert lora is not None and (lora.rank, lora.alpha, lora.targets) == (16, 32, ("q_proj", "v_proj"))
    assert dict(recipe.mesh) == {"dp": 4, "fsdp": 1, "tp": 1}
    assert (recipe.batch.global_sequences, recipe.train.steps, recipe.schedule.warmup_steps) == (32, 200, 20)
    assert (recipe.remat, recipe.optimizer.betas, recipe.schedule.name) == ("full", (0.9, 0.999), "cosine")
    assert names(translation) == {"saves_per_epoch", "save_steps"}


@pytest.mark.parametrize(
    ("tool", "file", "expected", "told"),
    [
        ("axolotl", "activation_offloading: true\ngradient_checkpointing: true", "activations", ""),
        ("axolotl", "activation_offloading: hidden_states\ngradient_checkpointing: true", "activations", ""),
        ("axolotl", "gradient_checkpointing: offload_disk", "activations", "not on its disk"),
        ("megatron", "--cpu-offloading-num-layers 2", 2, ""),
        ("megatron", "--cpu-offloading-num-layers 4", "activations", "one at least is not"),
        ("megatron", "--cpu-offloading-num-layers 2 --pipeline-model-parallel-size 2", "none", "at which it stops"),
        ("megatron", "--cpu-offloading-num-layers 2 --recompute-activations", 2, "with recomputation"),
        ("accelerate", "activation_offloading: true", "activations", ""),
    ],
)
def test_activations_that_wait_on_the_host(tool: str, file: str, expected: Any, told: str) -> None:
    before = {"axolotl": AXOLOTL, "megatron": "torchrun --nproc-per-node 2 x.py --num-layers 4 ",
              "accelerate": "distributed_type: FSDP\nnum_processes: 2\n"}  # fmt: skip
    translation, text = translated(tool, before[tool] + file)
    where = loads(text).offload
    assert (where if isinstance(where, str) else where.first) == expected
    assert told in str(Mistakes(translation.warnings)) + str(translation.left)


@pytest.mark.parametrize(
    ("said", "every", "left"),
    [
        ("save_strategy: no\neval_strategy: no", (0, 0), set()),
        ("save_strategy: epoch\neval_strategy: epoch", (500, 500), {"save_strategy", "eval_strategy"}),
        ("save_strategy: steps\nsave_steps: 7\neval_steps: 8", (7, 8), set()),
    ],
)
def test_when_axolotl_saves_and_evaluates(said: str, every: tuple[int, int], left: set[str]) -> None:
    translation, text = translated("axolotl", f"{AXOLOTL}val_set_size: 0.1\n{said}")
    recipe = loads(text)
    assert (recipe.checkpoint.every_steps, recipe.evaluate.every_steps) == every
    assert {name for name in names(translation) if name.startswith(("save", "eval"))} == left


@pytest.mark.parametrize(
    ("flags", "balance", "left"),
    [
        ("--moe-aux-loss-coeff 1e-2", "loss", set()),
        ("--moe-aux-loss-coeff 1e-2 --moe-router-enable-expert-bias", "bias", {"--moe-aux-loss-coeff"}),
        ("--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type seq_aux_loss", "loss",
         {"--moe-router-load-balancing-type"}),
        ("--moe-router-load-balancing-type sinkhorn", "none", {"--moe-router-load-balancing-type"}),
        ("--moe-router-load-balancing-type none", "none", set()),
        ("--moe-router-topk-scaling-factor 2.5", "none", {"--moe-router-topk-scaling-factor"}),
    ],
)  # fmt: skip
def test_megatron_s_balance_and_scores(flags: str, balance: str, left: set[str]) -> None:
    size = "torchrun x.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --qk-layernorm "
    translation, text = translated("megatron", size + flags)
    assert loads(text).model.balance == balance
    assert {name for name in names(translation) if name.startswith("--moe")} == left


def test_torchtitan_s_norm_of_zero_is_told() -> None:
    translation, text = translated("torchtitan", "[training]\nmax_norm = 0.0\n")
    assert "makes every gradient 0" in str(Mistakes(translation.warnings))
    assert loads(text).train.clip_grad_norm is None


def test_axolotl_of_a_base_in_few_bits(tmp_path: Path) -> None:
    """A known base stands for its quantized folder in plans; a pattern of layers is their names; a model of the hub is
    named; DeepSpeed's settings are those of the map, or of the file, that the configuration has."""
    extra = r"""
load_in_4bit: true
adapter: qlora
lora_target_modules: 'model.layers.[\d]+.(self_attn|mlp).(q|up)_proj'
deepspeed: {zero_optimization: {stage: 3}, gradient_clipping: auto}
eval_steps: 5
evals_per_epoch: 1
"""
    translation, text = translated("axolotl", AXOLOTL + extra, cluster__devices_per_node=8)
    recipe = loads(text)
    lora = recipe.adapters.lora
    assert recipe.adapters.packed and lora is not None and lora.targets == ("q_proj", "up_proj")
    assert recipe.quantize.bits == 4 and dict(recipe.mesh) == {"dp": 1, "fsdp": 8, "tp": 1}
    told = str(Mistakes(translation.warnings))
    assert "the key `adapter` occurs twice" in told and "eval_steps and evals_per_epoch are given" in told
    _, text = translated("axolotl", "base_model: google/gemma-2-2b\nbatch_size: 6\nmicro_batch_size: 2\n")
    assert loads(text).batch.global_sequences == 6 and 'hf: "hf:google/gemma-2-2b"' in text


def test_deepspeed_s_json(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(
        '{\n\t"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},\n'
        '"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 4,\n"optimizer": {"params": {"lr": 1e-3}}}'
    )
    yaml = b"""\
distributed_type: DEEPSPEED
deepspeed_config: {deepspeed_config_file: zero.json, zero_stage: 2}
num_processes: 4
"""
    settings = TOOLS["accelerate"].read(yaml, str(tmp_path / "x.yaml"))
    translation = translate(TOOLS["accelerate"], settings, {})
    text = text_of(TOOLS["accelerate"], str(tmp_path / "x.yaml"), translation)
    recipe = loads(text)
    assert (dict(recipe.mesh), recipe.model.dtype, recipe.optimizer.lr) == ({"dp": 1, "fsdp": 4, "tp": 1}, "bf16", 1e-3)
    assert recipe.batch.global_sequences == 16 and recipe.train.clip_grad_norm is None
    assert "zero.json line 2: deepspeed_config.zero_stage = 3" in text
    assert "deepspeed_config.offload_param_device" in names(translation)
    assert "stands beside a DeepSpeed JSON" in str(Mistakes(translation.warnings))


DEEPSPEED = """\
distributed_type: DEEPSPEED
num_processes: 4
mixed_precision: bf16
deepspeed_config:
  deepspeed_config_file:
    {zero_optimization: {stage: 2}, communication_data_type: fp32, data_types: {grad_accum_dtype: fp32},
     optimizer: {params: {lr: 1e-3}},
     scheduler: {type: WarmupLR, params: {warmup_min_lr: 0, warmup_max_lr: %s, warmup_num_steps: 5%s}}}
"""


@pytest.mark.parametrize(
    ("most", "form", "left"),
    [("1e-3", "", "warmup_type"), ("1e-3", ", warmup_type: linear", ""), ("1e-2", "", "warmup_max_lr")],
)
def test_deepspeed_s_types_and_warmup(most: str, form: str, left: str) -> None:
    """The types of sums and of what is sent are obeyed; a rise by the logarithm, its default, is named."""
    translation, text = translated("accelerate", DEEPSPEED % (most, form))
    fsdp = loads(text).fsdp
    assert (fsdp.reduce_dtype, fsdp.accumulate.dtype) == ("fp32", "fp32")
    told = {name for name in names(translation) if name.startswith("deepspeed_config.")}
    assert told == ({f"deepspeed_config.scheduler.params.{left}"} if left else set())


def test_accelerate_s_megatron_plugin() -> None:
    yaml = """\
distributed_type: MEGATRON_LM
megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2, megatron_lm_num_micro_batches: 4}
num_processes: 8
"""
    recipe = loads(translated("accelerate", yaml, model__preset="llama3-8b", batch__per_device=1)[1])
    assert dict(recipe.mesh) == {"pp": 2, "dp": 2, "fsdp": 1, "tp": 2} and recipe.batch.global_sequences == 8


REGISTRY = """\
BASE = dict(steps=100)

def _data(name):
    return Loader.Config(dataset=Packed(dataset=DATASETS[name]))

def llama3_small() -> Trainer.Config:
    spec = model_registry("8B", attn_backend="flex")
    return Trainer.Config(
        model_spec=spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096, steps=70),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        dataloader=_data("c4"),
    )

def llama3_lora():
    config = llama3_small()
    config.model_spec = model_registry(
        "8B", converters=[LoRAConverter.Config(rank=4, target_modules=["wq", "wkv", "w2"])]
    )
    return config

def llama3_large():
    config = other.changed(llama3_small())
    config.parallelism.tensor_parallel_degree = 4
    config.activation_checkpoint = None
    if config.compile.enable:
        config.training.steps = 1
    return config
"""


def test_torchtitan_s_registry() -> None:
    """A function of a Python file is followed as text: what it calls in the file, and what it changes."""

    def read(name: str) -> tuple[Translation, str]:
        settings = TOOLS["torchtitan"].read(REGISTRY.encode(), f"config.py{name}")
        translation = translate(TOOLS["torchtitan"], settings, {})
        return translation, text_of(TOOLS["torchtitan"], f"config.py{name}", translation)

    recipe = loads(read(":llama3_small")[1])
    assert (recipe.batch.per_device, recipe.model.seq_len, recipe.optimizer.lr) == (2, 4096, 3e-4)
    assert (recipe.train.steps, recipe.data.source, recipe.mesh["tp"]) == (70, "c4", 2)
    assert recipe.remat == ("attention", "wq", "wv", "gate", "down")
    translation, text = read(":llama3_large")
    assert loads(text).mesh["tp"] == 4 and loads(text).remat == "none"
    assert {"other.changed(...)", "training.steps"} <= names(translation)  # what only running tells
    lora = loads(read(":llama3_lora")[1]).adapters.lora
    assert lora is not None and (lora.rank, lora.alpha, lora.targets) == (4, 16, ("wq", "wk", "wv", "down"))
    for wrong, words in ((":llama3_smal", "did you mean `llama3_small`"), ("", "the file has 3 configurations")):
        with pytest.raises(Mistakes, match=words):
            read(wrong)


def test_each_of_several_reasons_is_told_of_its_flag() -> None:
    """Also of a default that the model here has not."""
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm --window-size 8,0"
    left = {one.key: one.why for one in translated("megatron", f"torchrun x.py {flags}")[0].left}
    assert "rotary" in left["--position-embedding-type"] and "rotary" not in left["--window-size"]


@pytest.mark.parametrize(
    ("flags", "state", "left"),
    [
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "bf16", set()),
        ("--exp-avg-dtype bf16", "bf16", {"--exp-avg-sq-dtype"}),
        ("--bf16 --initial-loss-scale 8", "fp32", set()),
        ("--fp16 --initial-loss-scale 8", "fp32", {"--initial-loss-scale"}),
        ("--weight-decay-incr-style linear --start-weight-decay 0.1", "fp32", {"--weight-decay-incr-style",
                                                                                "--start-weight-decay"}),
    ],
)  # fmt: skip
def test_megatron_s_moments_decay_and_scale(flags: str, state: str, left: set[str]) -> None:
    base = "torchrun --nproc-per-node 1 x.py --use-precision-aware-optimizer "
    plain, translation = names(translated("megatron", base)[0]), translated("megatron", base + flags)
    assert loads(translation[1]).optimizer.state_dtype == state and names(translation[0]) - plain == left


@pytest.mark.parametrize(
    ("points", "expected"), [('"layers.10"', (10, 22)), ('["layers.20"]', (20, 12)), ('"layers.10,layers.20"', None)]
)
def test_torchtitan_s_older_stages(points: str, expected: tuple[int, ...] | None) -> None:
    file = f"""\
[model]
flavor = "8B"
[optimizer]
fused = true
[training]
data_parallel_degree = 2
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_split_points = {points}
"""
    if expected is None:
        with pytest.raises(Mistakes, match="do not cut 32 layers into stages of 2 ranks"):
            translated("torchtitan", file)
        return
    translation, text = translated("torchtitan", file, cluster__devices_per_node=4)
    recipe = loads(text)
    assert recipe.pipeline is not None and recipe.pipeline.split == expected and recipe.mesh["fsdp"] == 2
    assert not any("fused" in name or "split_points" in name for name in names(translation))


@pytest.mark.parametrize(
    ("modules", "expected", "left"),
    [("core_attn", "none", {"--recompute-modules"}),
     ("layernorm moe_act", ("layers.*.attention_norm", "layers.*.mlp_norm"), set()),
     ("mlp mla_up_proj", ("layers.*.mlp",), {"--recompute-modules"})],
)  # fmt: skip
def test_megatron_s_modules_are_recomputed_by_pattern(modules: str, expected: Any, left: set[str]) -> None:
    flags = f"--recompute-granularity selective --recompute-modules {modules}"
    translation, text = translated("megatron", f"torchrun x.py --bf16 --num-layers 2 --hidden-size 64 {flags}")
    remat = loads(text).remat
    assert (remat if isinstance(remat, str) else remat.modules) == expected
    assert names(translation) & {"--recompute-modules"} == left


def test_accelerate() -> None:
    translation, text = translated("accelerate", ACCELERATE, model__preset="llama3-8b", batch__per_device=2)
    recipe = loads(text)
    assert dict(recipe.mesh) == {"dp": 2, "fsdp": 8, "tp": 1}
    assert (recipe.fsdp.master_dtype, recipe.fsdp.reduce_dtype, recipe.remat) == ("fp32", "bf16", "full")
    assert recipe.batch.global_sequences == 32
    assert names(translation) == {"seq_len", "max_steps", "fsdp_config.auto_wrap_policy"}  # the program says them


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_file_leaves_out_has_the_tool_s_default(tool: str) -> None:
    smallest = {"torchtitan": "", "megatron": "torchrun x.py --bf16 --num-layers 2", "axolotl": "base_model: x"}
    settings = TOOLS[tool].read(smallest.get(tool, "distributed_type: FSDP").encode(), "file")
    written = {line.key for line in translate(TOOLS[tool], settings, {}).lines}
    written |= {"seed"} if tool == "torchtitan" else set()  # which draws one
    written |= {"train.steps"} if "data.epochs" in written else set()
    assert set(DEFAULTS) - written == set()


CONFLICTS = {
    "layers": ("--recompute-granularity full --recompute-num-layers 0", "full recomputation of 0 layers", None),
    "mesh": ("--tensor-model-parallel-size 3 --nproc-per-node 8", "which 8 devices do not hold evenly", Exit.FIT),
    "batch": ("--nproc-per-node 8 --global-batch-size 12", "a global batch of 12 is not divided", Exit.RECIPE),
    "type": ("--num-layers many", "must be a whole number", Exit.RECIPE),
    "types": ("--bf16", "--bf16 and --fp16 together stop it", None),
    "moments": ("--exp-avg-dtype bf16", "--exp-avg-dtype bf16 needs --use-precision-aware-optimizer", None),
    "decay": ("--end-weight-decay 0.1", "--end-weight-decay needs --weight-decay-incr-style", None),
    "saved": ("--distribute-saved-activations --sequence-parallel", "not distributed with --sequence-parallel", None),
    "fsdp2": ("--use-torch-fsdp2", "--use-torch-fsdp2 stops it beside --fp16", None),
    "groups": ("--num-query-groups 2 --num-attention-heads 4", "has no effect without --group-query-attention", None),
    "lost": ("--bf16\n  --seq-length 8 --lr 1", "the line before lost its continuation", None),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_contradictions_are_told(case: str) -> None:
    flags, words, exit = CONFLICTS[case]
    script = f"torchrun pretrain.py --hidden-size 64 {flags} --fp16"
    try:
        told = translated("megatron", script)[0].warnings
        assert exit is None
    except Mistakes as mistakes:
        assert mistakes.exit == exit
        told = mistakes.diagnostics
    assert words in str(Mistakes(told)) and all(one.where is not None and one.where.line for one in told)


def test_a_lost_continuation_names_what_does_not_arrive() -> None:
    settings = shell_flags.read(b"torchrun a.py --lr 1 \\ \n --seq-length 8 \\\n --bf16\n", "file")
    assert [one.key for one in settings.lost] == ["--seq-length", "--bf16"] and list(settings.said) == ["--lr"]


def test_what_only_running_tells_is_unknown() -> None:
    script = """\
#SBATCH --nodes=3 --gpus-per-node=8
: ${KIND:=b}
case $KIND in a|c) N=1;; b)
  FIVE=5 ;; *) FIVE=6 ;; esac
[ $FIVE -gt 4 ] && SIX="--six 6" || SIX="--six 7"
if [ "$1" = a ]; then
 N=1
fi
srun --mpi x python t.py --one $N --two $(date) --three ${X:-3} --four "$((2 ** 9))" --five $FIVE $SIX
"""
    values = {key: one.value for key, one in shell_flags.read(script.encode(), "file").said.items()}
    assert (values["--three"], values["--five"], values["--six"]) == (3, 5, 6)
    assert (values["--nnodes"], values["--nproc-per-node"]) == (3, 8)
    assert all(isinstance(values[key], Unknown) for key in ("--one", "--two", "--four"))


def test_a_sourced_file_is_read_where_it_lies_beside(tmp_path: Path) -> None:
    """By its path, by what follows an unknown folder, by its name; a setting's place is its own file's. What is not
    here is told, and one that sources itself is read once."""
    (tmp_path / "models").mkdir()
    sizes = "source ../again.sh\nMODEL_ARGS=(\n  --num-layers ${LAYERS:-4}\n  --hidden-size 64\n)\nif x; then\n"
    (tmp_path / "models" / "small.sh").write_text(sizes)
    (tmp_path / "again.sh").write_text("SEQ=128\n. models/small.sh\n")
    script = """\
DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
LAYERS=2 source "${DIR}/models/small.sh" >/dev/null
[ -f x ] && . /root/elsewhere/again.sh
source ~/.bashrc
source "$DIR/$1.sh"
torchrun x.py ${MODEL_ARGS[@]} --seq-length ${SEQ} --lr 1 2>&1 | tee log
"""
    settings = shell_flags.read(script.encode(), str(tmp_path / "run.sh"))
    said = settings.said
    assert {key: one.value for key, one in said.items()} == {
        "--num-layers": 2, "--hidden-size": 64, "--seq-length": 128, "--lr": 1
    }  # fmt: skip
    where = said["--hidden-size"].where
    assert (Path(where.file).name, where.line, where.text) == ("small.sh", 4, "  --hidden-size 64")
    assert said["--lr"].where.line == 6
    told = [one.message.partition("`")[2].partition("`")[0] for one in settings.diagnostics]
    assert told[:2] == [". models/small.sh", "source ../again.sh"]  # which are being read
    assert told[2] == "source ~/.bashrc" and told[3].endswith("/$1.sh") and len(told) == 4


@pytest.mark.parametrize(
    ("said", "left"),
    [("converters = []", set()), ("converters = ['float8']", {"filter_fqns", "recipe_name"}),
     ("converters = ['float8']\n[quantize.linear.float8]\nfilter_fqns = ['output']", {"recipe_name"}),
     ("[float8]\nenable_float8_linear = true\nfilter_fqns = ['output', 'wk']\nenable_fsdp_float8_all_gather = true",
      {"filter_fqns", "recipe_name", "enable_fsdp_float8_all_gather"})],
)  # fmt: skip
def test_torchtitan_s_modules_in_fp8(said: str, left: set[str]) -> None:
    """What computes in fp8 there and not here, or the other way round, is named."""
    translation, text = translated("torchtitan", f"[model]\n{said}\n")
    assert loads(text).model.dtype == ("fp8" if left else "bf16")
    assert {name.rpartition(".")[2] for name in names(translation) if "float8" in name} == left


@pytest.mark.parametrize(
    ("flags", "left"),
    [("--fp8-recipe tensorwise --first-last-layers-bf16", set()),
     ("--fp8-format e4m3 --fp8-recipe blockwise", set()),
     ("--fp8-format hybrid --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
      {"--fp8-recipe", "--first-last-layers-bf16", "--num-layers-at-end-in-bf16"})],
)  # fmt: skip
def test_megatron_s_layers_in_fp8(flags: str, left: set[str]) -> None:
    translation, _ = translated("megatron", f"torchrun x.py --bf16 --num-layers 4 --hidden-size 256 {flags}")
    assert {name for name in names(translation) if "fp8" in name or "bf16" in name} == left


@pytest.mark.parametrize("tool", TOOLS)
def test_a_damaged_file_is_a_mistake_with_a_place(tool: str) -> None:
    text = INPUTS[tool]
    for end in range(1, len(text), 47):
        for damaged in (text[:end], text[end:], text[:end] + "\t[{'" + text[end:]):
            try:
                translated(tool, damaged)
            except (Mistakes, StopIteration) as error:
                assert isinstance(error, StopIteration) or all(one.where is not None for one in error.diagnostics)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_value_of_another_kind_is_a_mistake_or_obeyed(tool: str) -> None:
    """A number where a text is asked for and the like: never another error."""
    values = re.finditer(r"(?<=[:=] )[^\s,}{\[]+|(?<= )\d+", INPUTS[tool])
    for match, odd in zip(values, itertools.cycle(("0", "7.5", "word", "true"))):
        with contextlib.suppress(Mistakes):
            loads(translated(tool, INPUTS[tool][: match.start()] + odd + INPUTS[tool][match.end() :])[1])


def test_the_command_prints_a_recipe_and_what_it_cannot_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "titan.toml").write_text(TITAN)
    monkeypatch.chdir(tmp_path)
    assert run(["recipes", "from", "torchtitan", "titan.toml", "train.steps=5"]) == Exit.DONE
    printed = capsys.readouterr()
    assert loads(printed.out).train.steps == 5 and "not said: colours.sky = blue (line 19)" in printed.err
    assert run(["recipes", "from", "torchtitan", "titan.toml", "--json"]) == Exit.DONE
    document = json.loads(capsys.readouterr().out)
    assert loads(document["recipe"]).train.steps == 900 and document["not_said"][0]["line"] == 19
    assert run(["recipes", "from", "nemo", "titan.toml"]) == Exit.USAGE


HOSTILE = (
    ("torchtitan", "x = " + "[" * 9000),
    ("torchtitan:file.py", "def a():\n    return b(" + "(" * 500 + ")"),
    ("torchtitan:file.py", "def a():\n    return b(a(), a())"),
    ("torchtitan:file.py", "def a():\n    return b(x=" + "9**" * 99 + "9, y=" + "9*" * 900 + "9)\n" * 3),
    ("axolotl", "base_model: x\nadapter: lora\nlora_target_modules: '" + "(a+)+" * 30 + "b'"),
    ("torchtitan", ".".join("a" * 3000) + " = 1"),
    ("torchtitan", "[training]\nsteps = " + "9" * 6000),
    ("megatron", "$(\n" * 9000 + "torchrun x.py"),
    ("megatron", "torchrun x.py --lr " + "${a:-" * 9000),
    ("megatron", "torchrun x.py --num-layers 2 --micro-batch-size 0 --tensor-model-parallel-size 0"),
    ("megatron", "torchrun x.py --num-layers 2 --lr inf"),
    ("axolotl", "base_model: x\nnum_epochs: .nan"),
    ("axolotl", "base_model: x\nmicro_batch_size: 0\ngradient_accumulation_steps: -1"),
    ("axolotl", "a: " + "[" * 9000),
    ("axolotl", "a: 1\n" * 90_000),
    ("accelerate", "distributed_type: FSDP\nnum_processes: 0\nnum_machines: 0"),
)


@pytest.mark.parametrize(("tool", "text"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_file_is_a_mistake(tool: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Deep, endless, without a number that a recipe follows from: never a crash, nor minutes."""
    tool, _, name = tool.partition(":")
    (file := tmp_path / (name or "file")).write_text(text)
    assert run(["recipes", "from", tool, str(file)]) in (Exit.DONE, Exit.USAGE, Exit.RECIPE, Exit.FIT)
    assert capsys.readouterr().err


def test_a_file_without_an_end_is_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "from", "megatron", "/dev/zero"]) == Exit.USAGE
    assert "not a regular file" in capsys.readouterr().err


def test_texts_of_documents_are_read() -> None:
    """`read -d ''` and `$(cat <<EOF ...)` put one into a variable; other documents are left aside."""
    script = """cat > other.txt <<EOF
--num-layers 99
EOF
read -r -d '' MODEL <<'EOT'
--num-layers 24 --hidden-size 2048
--num-attention-heads $HEADS
EOT
TP=2
REST=$(cat <<EOF
  --tensor-model-parallel-size ${TP}
  --seq-length 2048
EOF
)
torchrun --nproc-per-node 8 pretrain_gpt.py $MODEL $REST --lr 1e-4 --train-iters 10 --bf16 --vocab-size 50304
"""
    said = shell_flags.read(script.encode(), "run.sh").said
    values = {key: said[key].value for key in ("--num-layers", "--hidden-size", "--tensor-model-parallel-size")}
    assert values == {"--num-layers": 24, "--hidden-size": 2048, "--tensor-model-parallel-size": 2}
    assert isinstance(said["--num-attention-heads"].value, str | Unknown) and said["--seq-length"].where.line == 11


def test_a_text_that_grows_under_a_condition_is_named() -> None:
    """What it held before is read, also where a variable is put in again; none of the rest is lost."""
    script = """B="--micro-batch-size 1"
if $FLASH; then B+=" --sequence-parallel"; fi
[ -n "$FULL" ] && B="$B --recompute-granularity full"
torchrun --nproc-per-node 8 pretrain_gpt.py $B --num-layers 24 --lr 1e-4
"""
    said = shell_flags.read(script.encode(), "run.sh").said
    assert said["--micro-batch-size"].value == 1
    unknown = {key: one.value.text for key, one in said.items() if isinstance(one.value, Unknown)}
    assert unknown == {
        "--sequence-parallel": "(under a condition)", "--recompute-granularity": "full (under a condition)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "said", "fall", "over"),
    [
        ("torchtitan", "[lr_scheduler]\ndecay_ratio = 0.8\ndecay_type = 'sqrt'\n[training]\nsteps = 100", "sqrt", 80),
        ("torchtitan", "[lr_scheduler]\nwarmup_steps = 10\ndecay_type = 'sqrt'\n[training]\nsteps = 100", "sqrt", 90),
        ("megatron", "x.py --bf16 --num-layers 2 --lr-decay-style WSD --lr-wsd-decay-iters 20", "exponential", 20),
        ("axolotl", "base_model: x\nmax_steps: 100\nlr_scheduler: warmup_stable_decay\nlr_scheduler_kwargs: "
         "{num_decay_steps: 30, decay_type: 1-sqrt}", "sqrt", 30),
        ("accelerate", "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 5}",
         "cosine", 5),
    ],
)  # fmt: skip
def test_the_last_fall_is_theirs(tool: str, said: str, fall: str, over: int) -> None:
    translation, _ = translated(tool, said)
    keys = {line.key: line.value for line in translation.lines}["schedule"]
    assert (keys["name"], keys["fall"], keys["decay_over"]) == ("wsd", fall, over)
    assert not [one for one in translation.left if one.matters and "decay" in one.key]
