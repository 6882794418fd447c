"""Models in the words of their authors: the module that transformers itself makes of a config.json, built on `meta`.

Nothing of such a folder is run: its code is refused, its pickles are not opened.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tpshard.kernels import gptq_config
from tpshard.models import hf_config, interface, own_attention


@dataclass(frozen=True)
class Architecture:
    """A causal language model of transformers, by its config.json."""

    raw: Mapping[str, Any]
    """config.json, as it stands, but for how weights are quantized: a module computes with the dense ones."""

    @staticmethod
    def of(folder: str | os.PathLike[str]) -> Architecture:
        """Of a folder. ValueError where it asks for code, is quantized by another method than GPTQ, or transformers has
        no such model."""
        raw = hf_config.read_raw(folder)
        gptq_config.read_config(Path(folder))  # raises
        made = Architecture({key: value for key, value in raw.items() if key != "quantization_config"})
        made.config  # noqa: B018 (raises)
        return made

    @property
    def model_type(self) -> str:
        return str(self.raw.get("model_type"))

    @cached_property
    def cls(self) -> Any:
        """The class that `architectures` names."""
        import transformers

        names = self.raw.get("architectures") or ()
        if not isinstance(names, list) or len(names) != 1:
            raise ValueError(f"config.json: `architectures: {names}` does not name one class")
        found = getattr(transformers, str(names[0]), None)
        if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
            raise ValueError(f"config.json: transformers {transformers.__version__} has no model called `{names[0]}`")
        return found

    @cached_property
    def config(self) -> Any:
        """transformers' own configuration object."""
        try:
            return self.cls.config_class.from_dict(dict(self.raw))
        except Exception as error:  # whatever the class makes of wrong numbers
            told = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"config.json: {self.cls.config_class.__name__} refuses it: {told}") from error

    @property
    def vocab(self) -> int | None:
        """Rows of its table of tokens, where it has one."""
        size = getattr(self.config.get_text_config(), "vocab_size", None)
        return None if size is None else int(size)

    @property
    def heads(self) -> tuple[int, int, int] | None:
        """Query heads, KV heads, numbers of a head; None where config.json does not say."""
        config = self.config.get_text_config()
        heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
        if heads is None or width is None:
            return None
        few = getattr(config, "num_key_value_heads", None) or heads
        return int(heads), int(few), int(getattr(config, "head_dim", None) or width // heads)

    @property
    def kind(self) -> str:
        """That dtype as recipes write it."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.dtype, "fp32")

    @property
    def max_seq(self) -> int | None:
        """The longest sequence that it is made for, where config.json says."""
        size = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return None if size is None else int(size)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters, by name."""
        return {name: tuple(parameter.shape) for name, parameter in self.build().named_parameters()}

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that config.json speaks of; fp32 where it does not."""
        named = str(self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32")
        found = getattr(torch, named.removeprefix("torch."), None)
        return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32

    @property
    def attends(self) -> bool:
        """Whether its attention goes through transformers' attention interface, so that ours can take its place."""
        return bool(getattr(self.cls, "_supports_attention_backend", False))

    def notes(self, model: nn.Module) -> list[str]:
        """What of its authors' training is not done: dropout, losses beside the cross-entropy, documents kept apart."""
        found = []
        config = self.config.get_text_config()
        dropped = {k: v for k, v in config.to_dict().items() if k.endswith(("dropout", "pdrop")) and v}
        if dropped:
            found.append(f"there is no dropout: {', '.join(f'{k}: {v}' for k, v in dropped.items())} of config.json")
        if getattr(config, "output_router_logits", False):
            found.append("the auxiliary loss of its router (output_router_logits) is not added to the loss")
        if not self.attends and not own_attention.placed(model):
            found.append(f"{self.cls.__name__} mixes tokens by itself: documents that share a row may see each other")
        return found

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """tokens, documents, positions, all [batch, seq] int64 -> logits [batch, seq, vocab].

        Parameters are on `meta`, in `dtype`; buffers that no folder holds (rotary frequencies) have their values.
        ValueError for a class that keeps other buffers, or that is not a causal language model.
        """
        interface.register()
        config = copy.deepcopy(self.config)
        config._attn_implementation = interface.NAME if self.attends else "eager"
        config._experts_implementation = interface.NAME
        try:
            with torch.device("meta"):
                model: nn.Module = self.cls(config)
        except Exception as error:
            told = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{self.cls.__name__} cannot be built from config.json: {told}") from error
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
        _fill_buffers(model)
        model.eval()
        self._as_language_model(model)
        return model

    def _as_language_model(self, model: nn.Module) -> None:
        """The signature that language models have here; names of parameters stay as they are."""
        takes = inspect.signature(type(model).forward).parameters
        if "input_ids" not in takes or "labels" not in takes or model.get_output_embeddings() is None:  # type: ignore[operator]
            raise ValueError(f"{type(model).__name__} is not a causal language model")
        further = {"use_cache": False} if "use_cache" in takes else {}
        step = None if self.attends else own_attention.take_place(model)

        def renamed(tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> dict[str, Any]:
            named: dict[str, Any] = {"input_ids": tokens, **further}
            if "position_ids" in takes:
                named["position_ids"] = positions
            if self.attends:
                named["documents"] = documents
            elif step is not None:
                step.documents, step.positions = documents, positions
            return named

        model.register_forward_pre_hook(lambda _, args, kwargs: ((), renamed(*args, **kwargs)), with_kwargs=True)
        model.register_forward_hook(lambda _, __, output: output.logits)


def _fill_buffers(model: nn.Module) -> None:
    """Gives buffers their values, by the class's own rule for what checkpoints do not hold."""
    kept = {name for name, _ in model.named_buffers()} & set(model.state_dict())
    if kept:
        raise ValueError(f"{type(model).__name__} keeps the buffer `{sorted(kept)[0]}` in its folder; not supported")
    for path, module in model.named_modules():
        if not any(buffer is not None for buffer in module._buffers.values()):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None:
                unset = float("nan") if buffer.is_floating_point() else -1
                module._buffers[name] = torch.full(buffer.shape, unset, dtype=buffer.dtype)
        model._init_weights(module)  # type: ignore[operator]
        for name, buffer in module._buffers.items():
            unset = buffer is not None and bool((buffer.isnan() if buffer.is_floating_point() else buffer == -1).all())
            if unset:
                raise ValueError(f"{type(model).__name__} does not say what the buffer `{path}.{name}` holds")
