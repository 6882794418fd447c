"""Scripts as recipes: what starts a program of transformers' Trainer, and what of a shell is followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign_files import ACCELERATE, names, translated
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.recipes.foreign.recipe_text import text_of
from tpshard.recipes.foreign.tools import TOOLS
from tpshard.recipes.foreign.translation import translate
from tpshard.recipes.reading.load import loads

LAUNCHED = """\
MODEL=Qwen/Qwen3-8B
accelerate launch --config_file own.yaml --num_processes 16 --num_machines 2 \\
    train.py --model_name_or_path $MODEL --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \\
    --max_length 4096 --max_steps 500 --bf16 --gradient_checkpointing --eval_strategy steps --report_to wandb none
"""


def test_a_script_that_launches_with_accelerate(tmp_path: Path) -> None:
    """The launcher's flags count over the file that it names, the program's over both."""
    script = tmp_path / "run.sh"
    script.write_text(LAUNCHED)
    settings = TOOLS["accelerate"].read(LAUNCHED.encode(), str(script))
    assert names(translate(TOOLS["accelerate"], settings, {})) >= {"--config_file"}
    (tmp_path / "own.yaml").write_text(ACCELERATE.replace("16", "8").replace("num_machines: 2", "num_machines: 1"))
    translation = translate(TOOLS["accelerate"], TOOLS["accelerate"].read(LAUNCHED.encode(), str(script)), {})
    recipe = loads(text_of(TOOLS["accelerate"], str(script), translation))
    assert dict(recipe.mesh) == {"dp": 2, "fsdp": 8, "tp": 1} and recipe.remat == "full"
    assert (recipe.batch.global_sequences, recipe.batch.per_device, recipe.train.steps) == (128, 2, 500)
    assert (recipe.model.preset, recipe.model.seq_len, recipe.model.width) == ("qwen3-4b", 4096, 4096)
    assert recipe.logging.wandb is not None and recipe.evaluate.every_steps == 500
    assert names(translation) == {"fsdp_config.auto_wrap_policy"}


OWN = """\
### model
model_name_or_path: Qwen/Qwen3-4B
stage: sft
finetuning_type: full
cutoff_len: 1024
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
max_steps: 50
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
bf16: true
"""


@pytest.mark.parametrize("given", ["own.yaml", "--config own.yaml", "--config=own.yaml --learning_rate 3e-5"])
def test_the_file_of_settings_that_a_program_is_given(given: str, tmp_path: Path) -> None:
    """As TRL's --config, or LLaMA-Factory's, which stands behind the program; flags count over it."""
    script, tool = tmp_path / "run.sh", TOOLS["accelerate"]
    text = f"accelerate launch --num_processes 8 --use_fsdp src/train.py {given}\n"
    assert names(translate(tool, tool.read(text.encode(), str(script)), {})) >= {given.split("=")[0].split()[0]}
    (tmp_path / "own.yaml").write_text(OWN)
    recipe = loads(text_of(tool, str(script), translate(tool, tool.read(text.encode(), str(script)), {})))
    assert (recipe.model.preset, recipe.model.seq_len, recipe.train.steps) == ("qwen3-4b", 1024, 50)
    assert (recipe.batch.global_sequences, recipe.batch.per_device, recipe.remat) == (64, 2, "full")
    assert recipe.optimizer.lr == (3e-5 if "rate" in given else 1e-5) and recipe.schedule.min_lr_ratio == 0.1
    alone = loads(text_of(tool, "own.yaml", translate(tool, tool.read(OWN.encode(), str(tmp_path / "own.yaml")), {})))
    assert (alone.batch.global_sequences, alone.remat, alone.train.steps) == (8, "full", 50)
    _, text = translated("accelerate", OWN, cluster__devices_per_node=4)
    assert dict(loads(text).mesh) == {"dp": 4, "fsdp": 1, "tp": 1}


def test_a_launcher_in_a_variable() -> None:
    _, text = translated("accelerate", "export RUN=torchrun\nsrun $RUN --nproc_per_node 4 train.py --bf16\n")
    assert dict(loads(text).mesh)["dp"] == 4


def test_a_program_that_has_flags_of_its_own_is_told_as_that() -> None:
    script = "torchrun --nproc_per_node 4 train.py --hidden_width 4096 --num_layers 32 --max_steps 5"
    translation, _ = translated("accelerate", script)
    assert "not those of transformers' Trainer" in str(Mistakes(translation.warnings))
    translation, _ = translated("accelerate", f"{script} --output_dir x")
    assert not translation.warnings


def test_a_module_is_launched_as_a_program_is() -> None:
    flags = "accelerate launch --use_deepspeed --zero_stage 3 --num_processes 4 --mixed_precision bf16 -m a.b --seed 7"
    translation, text = translated("accelerate", flags + " --max_steps=-1", model__preset="tiny")
    recipe = loads(text)
    assert dict(recipe.mesh)["fsdp"] == 4 and recipe.seed == 7 and recipe.model.dtype == "bf16"
    assert names(translation) == {"seq_len", "max_steps", "per_device_train_batch_size"}


TORCHRUN = """\
torchrun --nproc_per_node=4 --master_port=1234 train.py --model_name_or_path meta-llama/Llama-2-7b-hf --bf16 True \\
    --num_train_epochs 3 --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --evaluation_strategy "no" \\
    --save_strategy "steps" --save_steps 2000 --save_total_limit 1 --learning_rate 2e-5 --warmup_ratio 0.03 \\
    --lr_scheduler_type "cosine" --fsdp "shard_grad_op auto_wrap" --fsdp_config fsdp.json --model_max_length 512
"""


def test_a_script_of_torchrun_says_what_the_trainers_flags_do(tmp_path: Path) -> None:
    script, tool = tmp_path / "run.sh", TOOLS["accelerate"]
    (tmp_path / "fsdp.json").write_text('{"activation_checkpointing": true, "min_num_params": 5}')
    translation = translate(tool, tool.read(TORCHRUN.encode(), str(script)), {})
    recipe = loads(text_of(tool, str(script), translation))
    assert dict(recipe.mesh) == {"dp": 1, "fsdp": 4, "tp": 1}
    assert (recipe.remat, recipe.model.seq_len, recipe.data.epochs) == ("full", 512, 3)
    assert recipe.fsdp.reshard_after_forward is False
    assert (recipe.batch.global_sequences, recipe.checkpoint.every_steps, recipe.checkpoint.keep_last) == (128, 2000, 1)
    assert names(translation) == {"--warmup_ratio", "min_num_params"}


@pytest.mark.parametrize(
    ("script", "mesh", "left"),
    [
        ("deepspeed --num_gpus=8 a.py --deepspeed --deepspeed_config ds.json --max_seq_len 64", (1, 8), set()),
        ("python -m torch.distributed.run --nproc_per_node 2 --nnodes 2 a.py --max_length 64", (4, 1), set()),
        ("N=4\nsrun torchrun --nproc-per-node $N --nnodes $M -m a.b --max_length 64", (4, 1), {"--nnodes"}),
        ("python a.py --max_length 64 --stage dpo", (1, 1), {"--stage"}),
    ],
)  # fmt: skip
def test_other_launchers(tmp_path: Path, script: str, mesh: tuple[int, int], left: set[str]) -> None:
    tool = TOOLS["accelerate"]
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}')
    script += " --max_steps 9 --per_device_train_batch_size 2 --model_name_or_path gpt2 --bf16\n"
    translation = translate(tool, tool.read(script.encode(), str(tmp_path / "run.sh")), {})
    assert {line.key: line.value for line in translation.lines}["mesh"] == {"dp": mesh[0], "fsdp": mesh[1], "tp": 1}
    assert names(translation) - {"--model_name_or_path"} == left
    assert not translation.warnings


@pytest.mark.parametrize(
    ("flags", "lora"),
    [
        ("--use_peft --lora_r 4", {"rank": 4, "alpha": 32.0, "dropout": 0.05}),
        ("--use_peft --lora_target_modules q_proj v_proj --lora_alpha 8", {"rank": 16, "alpha": 8.0, "dropout": 0.05}),
        ("--finetuning_type lora --lora_target q_proj,v_proj", {"rank": 8, "alpha": 16.0, "dropout": 0.0}),
        (
            "--use_peft --lora_target_modules q_proj --lora_target_parameters experts.gate_up_proj gate.weight",
            {"targets": ("q_proj", "experts.gate_up_proj", "gate")},
        ),
        ("--finetuning_type full", None),
    ],
)
def test_adapters_of_trl_and_llama_factory(flags: str, lora: dict[str, Any] | None) -> None:
    _, text = translated("accelerate", f"python a.py {flags} --max_steps 3", model__preset="tiny")
    read = loads(text).adapters.lora
    assert (lora is None) == (read is None)
    if lora is not None and read is not None:
        assert {key: getattr(read, key) for key in lora} == lora
        usual = ("q_proj", "v_proj") if "v_proj" in flags else ("all-linear",)
        assert read.targets == lora.get("targets", usual)


@pytest.mark.parametrize("least", ['{"min_lr_rate": 0.1}', '{"min_lr": 2e-6}'])
def test_a_map_behind_a_flag_is_read(least: str) -> None:
    flags = f"--learning_rate 2e-5 --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{least}' --max_steps 3"
    translation, text = translated("accelerate", f"python a.py --bf16 --torch_dtype float32 {flags}")
    recipe = loads(text)
    assert recipe.schedule.min_lr_ratio == pytest.approx(0.1) and recipe.fsdp.master_dtype == "fp32"
    assert not any("lr_scheduler" in name or "dtype" in name for name in names(translation))
    with pytest.raises(Mistakes, match="lr_scheduler_kwargs holds no map"):
        translated("accelerate", "python a.py --learning_rate 1e-5 --lr_scheduler_kwargs '{min_lr: '")


def test_what_is_wrong_with_a_programs_flag_names_the_flag() -> None:
    with pytest.raises(Mistakes) as caught:
        translated("accelerate", "python a.py --per_device_train_batch_size two --max_steps 3")
    assert caught.value.diagnostics[0].message == "`--per_device_train_batch_size: two` must be a whole number"


def test_a_script_that_starts_nothing_is_told_as_such() -> None:
    with pytest.raises(Mistakes) as caught:
        translated("accelerate", "#!/bin/bash\necho hello\n")
    assert caught.value.diagnostics[0].message == "the script starts no training"


STARTED = """\
MODEL=(--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048)
run() {
  srun --nodes 2 --gpus-per-node 8 python pretrain_gpt.py "${MODEL[@]}" "$@" --tensor-model-parallel-size 2
}
run --train-iters 100 --bf16 --lr 1e-4 --micro-batch-size 2
"""


def test_a_function_has_the_words_of_its_one_call() -> None:
    keys = {line.key: line.value for line in translated("megatron", STARTED)[0].lines}
    assert (keys["mesh"], keys["train.steps"]) == ({"dp": 8, "fsdp": 1, "tp": 2}, 100)
    twice = translated("megatron", STARTED + "run --train-iters 5 --bf16\n")[0]
    assert "$@" in names(twice), "of several calls none counts"


def test_a_loop_over_one_word_has_its_value() -> None:
    script = (
        "for TP in 4; do\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --bf16"
        " --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1"
        " --tensor-model-parallel-size $TP --train-iters 9 --lr 1e-4\ndone\n"
    )
    assert {line.key: line.value for line in translated("megatron", script)[0].lines}["mesh"]["tp"] == 4
    several = translated("megatron", script.replace("in 4", "in 2 4"))[0]
    assert "--tensor-model-parallel-size" in names(several)
