"""A script that starts a program of transformers' Trainer: flags of the launcher and the program, and files they name.

Launchers are `accelerate launch`, `torchrun` (also as `python -m torch.distributed.run` or `.launch`) and `deepspeed`;
a program that `python` starts has one device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from tpshard.diagnostics.diagnostic import Diagnostic, Mistakes, Source
from tpshard.files.folder_json import read_named
from tpshard.recipes.foreign import deepspeed
from tpshard.recipes.settings import shell_flags, yaml_settings
from tpshard.recipes.settings.stated import Stated, StatedSettings, of_tree
from tpshard.recipes.text.nodes import compose

LARGEST = 1 << 18
"""Bytes of a configuration."""
MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Launchers that are modules of Python."""
ACCELERATE = "accelerate "
KINDS = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU"}
"""Flags that choose how processes share the work."""
SECTIONS = {"fsdp_": "fsdp_config", "megatron_lm_": "megatron_lm_config", "parallelism_config_": "parallelism_config",
            "dynamo_": "dynamo_config"}  # fmt: skip
"""The sections of a configuration whose settings have flags with such a beginning."""
OF_DEEPSPEED = ("zero_stage", "gradient_accumulation_steps", "gradient_clipping", "deepspeed_config_file",
                "offload_optimizer_device", "offload_param_device", "zero3_init_flag", "zero3_save_16bit_model",
                "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_moe_layer_cls_names")  # fmt: skip
PROGRAM = {
    "per_device_train_batch_size": "recipe.batch.per_device",
    **dict.fromkeys(("max_steps", "max_train_steps"), "recipe.train.steps"),
    **dict.fromkeys(
        ("max_seq_length", "max_seq_len", "max_length", "block_size", "model_max_length", "cutoff_len"),
        "recipe.model.seq_len",
    ),
    "gradient_accumulation_steps": "deepspeed_config.gradient_accumulation_steps",
    "max_grad_norm": "deepspeed_config.gradient_clipping", "evaluation_strategy": "eval_strategy",
    "num_warmup_steps": "warmup_steps", "zero_stage": "deepspeed_config.zero_stage",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_config.transformer_layer_cls_to_wrap", "lora_rank": "lora_r",
    "lora_target": "lora_target_modules",
}  # fmt: skip
"""Flags of programs that use transformers' Trainer, whose values stand for a recipe's keys or a configuration's."""
SWITCHES = {"bf16": ("mixed_precision", "bf16"), "fp16": ("mixed_precision", "fp16"),
            "torch_compile": ("dynamo_config.dynamo_backend", "inductor"),
            "gradient_checkpointing": ("fsdp_config.fsdp_activation_checkpointing", True)}  # fmt: skip
"""Flags of such programs that switch on what a configuration may say too."""
HOSTS, EACH = ("--nnodes", "--num-nodes"), ("--nproc-per-node", "--nproc-per-nodes", "deepspeed --num-gpus")
"""The flags of other launchers that say how many hosts there are, and how many devices each has."""


def is_script(data: bytes, file: str) -> bool:
    """Whether a file is a script. Raises `Mistakes` for one that starts no such program."""
    text = data.decode("utf-8", "replace")
    if any(map(_starts_program, text.splitlines())):
        return True
    if text.startswith("#!") or file.endswith(".sh"):
        where = Source(file, 1, 1, text.split("\n", 1)[0])
        fix = "a script with accelerate launch, torchrun, deepspeed or python, a program and its flags"
        raise Mistakes.one("the script starts no training", where=where, fix=fix)
    return False


def _starts_program(line: str) -> bool:
    """Whether a line of a script starts a program, or begins to where it is continued."""
    words = re.split(r"[\s\"'=(;&|]+", line.partition("#")[0].strip())  # a variable may hold the command
    held = re.match(r"\s*(export\s+)?\w+=", line)  # the launcher alone, by an assignment
    names = [word.rpartition("/")[2] for word in (words if held else words[:-1])]
    if "torchrun" in names or ("accelerate", "launch") in pairwise([*names, words[-1]]):
        return True
    continued = words[-1].endswith("\\")
    if "deepspeed" in names:
        return continued or any(word.endswith(".py") for word in words)
    if not any(re.fullmatch(r"python[\d.]*", name) for name in names):
        return False
    module = any(pair[0] == "-m" and pair[1] in MODULES for pair in pairwise(words))
    program = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    return module or (program < len(words) and (continued or any(w.startswith("--") for w in words[program:])))


def read(data: bytes, file: str) -> StatedSettings:
    """The settings of a script, by their paths in a configuration. The launcher's flags count over its file, the
    program's over both. Raises `Mistakes` for a file without flags, or a damaged configuration."""
    script = shell_flags.read(data, file)
    launched = {key: one for key, one in script.said.items() if re.match(r"\S+ --|\$", key) or key in (*HOSTS, *EACH)}
    program = [one for key, one in script.said.items() if key not in launched]
    own = [one for key, one in launched.items() if key.startswith(ACCELERATE)]
    named = next((one for one in own if one.key.endswith("--config-file")), None)
    base = None if named is None or not isinstance(named.value, str) else _yaml(named.value, file)
    launcher = [*_accelerate([one for one in own if base is None or one is not named], base or {}), *_ranks(launched)]
    ours = {one.key: one for one in launcher}
    said = {**(base or {}), **ours, **{one.key: one for one in _program(_with_own_file(program, file), file)}}
    return replace(script, said=said, diagnostics=(*script.diagnostics, *_other_program(program)))


OF_TRAINER = {
    "model_name_or_path", "per_device_train_batch_size", "num_train_epochs", "learning_rate", "output_dir", "fsdp",
    "gradient_accumulation_steps", "bf16", "fp16", "config", "deepspeed", "deepspeed_config", "use_peft", "stage",
    "finetuning_type",
}  # fmt: skip
"""Flags of which a program of transformers' Trainer has one at least."""


def _other_program(flags: Sequence[Stated]) -> Iterator[Diagnostic]:
    """A warning where a program's flags are not those of transformers' Trainer."""
    if len(flags) > 2 and not any(_plain(one.key) in OF_TRAINER for one in flags):
        yield Diagnostic(
            "the program's flags are not those of transformers' Trainer", where=flags[0].where, severity="warning",
            why="the Trainer's defaults stand for what the script does not say",
            fix="give keys, such as optimizer.lr=...",
        )  # fmt: skip


def of_program(settings: StatedSettings, file: str) -> StatedSettings:
    """The settings of a YAML that is a program's own, such as TRL's or LLaMA-Factory's, by their paths in a
    configuration; those of a launcher's YAML as they are."""
    if not settings.said.keys() & {*PROGRAM, "model_name_or_path"}:
        return settings
    return replace(settings, said={one.key: one for one in _program(settings.said.values(), file)})


def _with_own_file(flags: Sequence[Stated], file: str) -> Iterator[Stated]:
    """A program's flags, behind the settings of the YAML or JSON that it is given, over which they count."""
    for one in flags:
        if one.key == "--config" and isinstance(one.value, str):
            inside = _yaml(one.value, file)
            yield from [one.named("config")] if inside is None else inside.values()
    yield from (one for one in flags if one.key != "--config" or not isinstance(one.value, str))


def _yaml(name: str, file: str) -> Mapping[str, Stated] | None:
    """The settings of a configuration that the script in `file` names; None where there is none."""
    found = read_named(name, file, LARGEST)
    return None if found is None else yaml_settings.read(*found).said


def _accelerate(flags: list[Stated], base: Mapping[str, Any]) -> Iterator[Stated]:
    names = {_plain(one.key.removeprefix(ACCELERATE)): one for one in flags}
    kind = next((name for name in KINDS if name in names), "")
    if kind:
        yield names[kind].meaning("distributed_type", KINDS[kind])
    elif "distributed_type" not in base and "num_processes" in names:
        yield names["num_processes"].meaning("distributed_type", "MULTI_GPU")
    for name, one in names.items():
        section = next((place for start, place in SECTIONS.items() if name.startswith(start)), "")
        if name in OF_DEEPSPEED:
            section = "deepspeed_config"
        if name not in KINDS:
            yield one.named(f"{section}.{name}" if section else name)


def _ranks(flags: Mapping[str, Stated]) -> Iterator[Stated]:
    """How many processes another launcher starts; what else it is told is set aside."""
    hosts = next((flags[key] for key in HOSTS if key in flags), None)
    each = next((flags[key] for key in EACH if key in flags), None)
    several = 1
    if hosts is not None:
        several = hosts.value if isinstance(hosts.value, int) else 1
        yield hosts.named("num_machines")
    if each is not None:
        whole = each.value * several if isinstance(each.value, int) else each.value
        yield each.meaning("distributed_type", "MULTI_GPU")
        yield each.meaning("num_processes", whole)
    elif hosts is not None and several > 1:
        yield hosts.meaning("distributed_type", "MULTI_GPU")
        yield hosts.meaning("num_processes", several)
    for key, one in flags.items():
        if not key.startswith(ACCELERATE) and key not in (*HOSTS, *EACH):
            yield one if key.startswith("$") else one.named(f"launcher.{_plain(key.partition(' ')[2])}")


def _program(flags: Iterable[Stated], file: str) -> Iterator[Stated]:
    for one in flags:
        name = _plain(one.key)
        if name == "max_steps" and isinstance(one.value, int) and one.value <= 0:  # none: epochs count
            continue
        if isinstance(one.value, str) and one.value.lstrip().startswith("{") and name.endswith(("_kwargs", "_config")):
            yield from _map(one, name)
        elif name in ("deepspeed", "deepspeed_config") and one.value is not False:
            yield one.meaning("distributed_type", "DEEPSPEED")
            if isinstance(one.value, str):
                yield one.named("deepspeed_config.deepspeed_config_file")
        elif name == "fsdp" and one.value not in ("", True):
            yield from _fsdp(one)
        elif name == "fsdp_config" and isinstance(one.value, str):
            inside = deepspeed.named_json(one.value, file, "is this the Trainer's JSON for FSDP?")
            yield from [one] if inside is None else (two.named(f"fsdp_config.{key}") for key, two in inside.items())
        elif name not in SWITCHES:
            yield replace(one.named(PROGRAM.get(name, name)), of_program=True)
        elif str(one.value).lower() != "false":
            yield replace(one.meaning(*SWITCHES[name]), of_program=True)


def _map(one: Stated, name: str) -> Iterator[Stated]:
    """The settings of a map, in JSON or YAML, that stands behind a flag. Raises `Mistakes` for a damaged one."""
    try:
        inside = of_tree(compose(one.value, name, mapping=False))
    except Mistakes as error:
        message = f"{one.name} holds no map of settings: {error.diagnostics[0].message}"
        raise Mistakes.one(message, where=one.where, fix="correct it") from error
    for key, setting in inside.items():
        yield replace(one.meaning(f"{name}.{key}", setting.value), of_program=True)


def _fsdp(one: Stated) -> Iterator[Stated]:
    """What the words behind the Trainer's `--fsdp` stand for in a configuration."""
    words = one.value if isinstance(one.value, list) else str(one.value).split()
    yield one.meaning("distributed_type", "FSDP")
    for word in map(str, words):
        if word in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"):
            yield one.meaning("fsdp_config.sharding_strategy", word.upper())
        elif word == "auto_wrap":
            yield one.meaning("fsdp_config.auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
        elif word == "offload":
            yield one.meaning("fsdp_config.offload_params", True)
        else:
            yield one.named(f"fsdp_config.{word}")


def _plain(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
