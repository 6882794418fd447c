"""torchtitan's registries, Python files of functions that return a configuration, as settings of its TOML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tpshard.diagnostics.diagnostic import Source
from tpshard.recipes.settings.python_configs import Made, PythonFile
from tpshard.recipes.settings.stated import Stated, StatedSettings, Unknown, by_key

MODELS = ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss", "kimi_k2", "moonlight", "flux")
SECTIONS = {"validator": "validation", "profiler": "profiling", "model_converters": "model"}
KEYS = {
    "hf_assets_path": "model.hf_assets_path", "dump_folder": "job.dump_folder",
    "training.max_context_length": "training.seq_len",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
}  # fmt: skip
CONVERTERS = {"Float8Linear": "quantize.linear.float8", "MXFP8Linear": "quantize.linear.mx"}
POLICIES = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}


def read(text: str, file: str, name: str) -> StatedSettings:
    """The settings of the configuration that a function returns. Raises `Mistakes`."""
    made = PythonFile(text, file).configuration(name)
    said = by_key(_settings(made))
    spec = made.fields.get("model_spec", (None, made.where))[0]
    if isinstance(spec, Made):
        family = next((one for one in MODELS if re.search(rf"(^|_){one}", name)), None)
        family = family or next((one for one in MODELS if f"/{one}/" in f"/{file}"), None)
        said |= by_key(_model(spec, family or "?"))
    policy, place = made.fields.get("activation_checkpoint", (Made("SelectiveAC.Config", made.where), made.where))
    if policy is None or (isinstance(policy, Made) and policy.name.partition(".")[0] in POLICIES):
        mode = POLICIES[policy.name.partition(".")[0]] if isinstance(policy, Made) else "none"
        said |= by_key(_stated("activation_checkpoint", place, mode=mode, selective_ac_option="op"))
    _sequences(said)
    return StatedSettings({one.key: one for one in said.values()})


def _stated(section: str, where: Source, **values: Any) -> Iterator[Stated]:
    yield from (Stated(f"{section}.{key}", value, where) for key, value in values.items())


def _settings(made: Made, path: str = "") -> Iterator[Stated]:
    """The settings of a configuration, each field by its path."""
    if path == "optimizer" and (made.name.endswith("adamw") or "Optimizers" in made.name):
        kwargs = {} if "param_groups" in made.fields else {"name": "AdamW"}
        early = {"early_step_in_backward": True} if "InBackward" in made.name else {}
        yield from _stated(path, made.where, **kwargs, **early)
    if path == "loss" and made.name.startswith("Chunked"):
        yield Stated("loss.num_chunks", 8, made.where)
    if path == "validation":
        yield Stated("validation.enable", False, made.where)
    for name, (value, where) in made.fields.items():
        key = f"{path}.{name}" if path else SECTIONS.get(name, name)
        key = KEYS.get(key, key)
        if key in ("model_spec", "activation_checkpoint"):
            continue
        if key.endswith(".dataset") or key == "dataset":
            yield Stated("training.dataset" if path == "dataloader" else key, _data_set(value), where)
        elif key == "optimizer.param_groups" and isinstance(value, list) and len(value) == 1:
            yield from _group(value[0])
        elif key == "model.converters":
            yield from _converters(value, where)
        elif key == "optimizer.betas" and isinstance(value, list):
            yield from _stated("optimizer", where, **dict(zip(("beta1", "beta2"), value)))
        elif isinstance(value, Made):
            yield from _settings(value, key)
        else:
            yield Stated(key, _plain(value), where)


def _group(group: Any) -> Iterator[Stated]:
    """The optimizer of all parameters."""
    if not isinstance(group, Made):
        return
    fields = {key: value for key, (value, _) in group.fields.items()}
    keys = fields.get("optimizer_kwargs")
    if isinstance(keys, dict):
        betas = keys.get("betas") or []
        values = {key: value for key, value in keys.items() if key != "betas"} | dict(zip(("beta1", "beta2"), betas))
        yield from _stated("optimizer", group.where, name=fields.get("optimizer_name", "AdamW"), **values)


def _model(spec: Made, family: str) -> Iterator[Stated]:
    flavor = spec.args[0] if spec.args else spec.fields.get("flavor", (Unknown("?"), None))[0]
    yield from _stated("model", spec.where, name=family, flavor=_plain(flavor))
    for key, (value, where) in spec.fields.items():
        if key == "converters":
            yield from _converters(value, where)
        elif key != "flavor":
            yield Stated(f"model.{key}", _plain(value), where)


def _converters(value: Any, where: Source) -> Iterator[Stated]:
    """The names of converters, and each one's own settings."""
    if not isinstance(value, list):
        yield Stated("model.converters", _plain(value), where)
        return
    names = []
    for one in value:
        name = one.name.partition(".")[0].removesuffix("Converter") if isinstance(one, Made) else str(one)
        names.append(CONVERTERS.get(name, name))
        section = {"LoRA": "lora"}.get(name, names[-1] if "." in names[-1] else f"quantize.{name}")
        own = one.fields.items() if isinstance(one, Made) else ()
        if name == "Float8Linear" and isinstance(one, Made):  # its default there, another than the TOML's
            yield Stated(f"{section}.recipe_name", "rowwise", one.where)
        yield from (Stated(f"{section}.{key}", _plain(field), place) for key, (field, place) in own)
    yield Stated("model.converters", names, where)


def _data_set(value: Any) -> Any:
    """The name of a data set, which stands in what packs it."""
    if isinstance(value, Made) and "dataset" in value.fields:
        return _data_set(value.fields["dataset"][0])
    if isinstance(value, Unknown) and (match := re.fullmatch(r"""DATASETS\[["'](\w+)["']\]""", value.text)):
        return match[1]
    return _plain(value)


def _plain(value: Any) -> Any:
    """Plain data, or `Unknown` as a whole where a part is not known."""
    if isinstance(value, Made):
        return Unknown(f"{value.name}(...)")
    parts = list(value) if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    odd = next((one for one in map(_plain, parts) if isinstance(one, Unknown)), None)
    return odd if odd is not None else value


def _sequences(said: dict[str, Stated]) -> None:
    """Numbers of tokens as numbers of sequences."""
    length = said.get("training.seq_len")
    tokens = length.value if length is not None and type(length.value) is int and length.value > 0 else 2048
    for theirs, ours in (
        ("training.num_tokens_per_microbatch_per_dp_rank", "training.local_batch_size"),
        ("training.num_tokens_per_train_step", "training.global_batch_size"),
    ):
        one = said.pop(theirs, None)
        if one is not None:
            whole = type(one.value) is int and one.value % tokens == 0
            value = one.value // tokens if whole else one.value if one.value == -1 else Unknown(one.shown)
            said[ours] = replace(one, key=ours, value=value)
