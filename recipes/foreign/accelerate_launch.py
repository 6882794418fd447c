"""A script that calls `accelerate launch`: the launcher's flags, the configuration that it names, and the program's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tpshard.files.folder_json import read_named
from tpshard.recipes.settings import shell_flags, yaml_settings
from tpshard.recipes.settings.stated import Stated, StatedSettings

LARGEST = 1 << 18
"""Bytes of a configuration."""
LAUNCHER = "accelerate "
KINDS = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU"}
"""Flags that choose how processes share the work."""
SECTIONS = {"fsdp_": "fsdp_config", "megatron_lm_": "megatron_lm_config", "parallelism_config_": "parallelism_config",
            "dynamo_": "dynamo_config"}  # fmt: skip
"""The sections of a configuration whose settings have flags with such a beginning."""
OF_DEEPSPEED = ("zero_stage", "gradient_accumulation_steps", "gradient_clipping", "deepspeed_config_file",
                "offload_optimizer_device", "offload_param_device", "zero3_init_flag", "zero3_save_16bit_model",
                "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_moe_layer_cls_names")  # fmt: skip
PROGRAM = {
    "per_device_train_batch_size": "recipe.batch.per_device", "max_steps": "recipe.train.steps",
    "max_train_steps": "recipe.train.steps", "max_seq_length": "recipe.model.seq_len",
    "max_length": "recipe.model.seq_len", "block_size": "recipe.model.seq_len",
    "gradient_accumulation_steps": "deepspeed_config.gradient_accumulation_steps",
}  # fmt: skip
"""Flags of programs that use transformers' Trainer, whose values stand for a recipe's keys or a configuration's."""
SWITCHES = {"bf16": ("mixed_precision", "bf16"), "fp16": ("mixed_precision", "fp16"),
            "torch_compile": ("dynamo_config.dynamo_backend", "inductor"),
            "gradient_checkpointing": ("fsdp_config.fsdp_activation_checkpointing", True)}  # fmt: skip
"""Flags of such programs that switch on what a configuration may say too."""


def read(data: bytes, file: str) -> StatedSettings:
    """The settings of a script, by their paths in a configuration. The launcher's flags count over its file, the
    program's over both. Raises `Mistakes` for a file without flags, or a damaged configuration."""
    script = shell_flags.read(data, file)
    launched = [one for key, one in script.said.items() if key.startswith(LAUNCHER)]
    named = next((one for one in launched if one.key.endswith("--config-file")), None)
    base = None if named is None or not isinstance(named.value, str) else _named(named.value, file)
    own = [one for one in launched if base is None or one is not named]
    ours = {one.key: one for one in _launcher(own, base or {})}
    program = [one for key, one in script.said.items() if not key.startswith(LAUNCHER)]
    said = {**(base or {}), **ours, **{one.key: one for one in _program(program)}}
    return replace(script, said=said)


def _named(name: str, file: str) -> Mapping[str, Stated] | None:
    """The settings of a configuration that the script in `file` names; None where there is none."""
    found = read_named(name, file, LARGEST)
    return None if found is None else yaml_settings.read(*found).said


def _launcher(flags: list[Stated], base: Mapping[str, Any]) -> Iterator[Stated]:
    names = {one.key.removeprefix(LAUNCHER).removeprefix("--").replace("-", "_"): one for one in flags}
    kind = next((name for name in KINDS if name in names), "")
    if kind:
        yield replace(names[kind], key="distributed_type", value=KINDS[kind])
    elif "distributed_type" not in base and "num_processes" in names:
        yield replace(names["num_processes"], key="distributed_type", value="MULTI_GPU")
    for name, one in names.items():
        section = next((place for start, place in SECTIONS.items() if name.startswith(start)), "")
        if name in OF_DEEPSPEED:
            section = "deepspeed_config"
        if name not in KINDS:
            yield replace(one, key=f"{section}.{name}" if section else name)


def _program(flags: list[Stated]) -> Iterator[Stated]:
    for one in flags:
        name = one.key.removeprefix("--").replace("-", "_")
        if name == "max_steps" and isinstance(one.value, int) and one.value <= 0:  # none: epochs count
            continue
        if name not in SWITCHES:
            yield replace(one, key=PROGRAM.get(name, name))
        elif one.value not in (False, "False", "false"):
            key, value = SWITCHES[name]
            yield replace(one, key=key, value=value)
