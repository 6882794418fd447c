"""Models computed by transformers' own classes, built on `meta` from a folder's config.json.

No code of the folder runs: remote code is refused, pickles are not opened.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from tpshard.files.folder_json import FolderError
from tpshard.kernels.quantized import gptq_config
from tpshard.models import dims
from tpshard.models.families.config_keys import training_notes
from tpshard.models.folders import hf_config
from tpshard.models.objectives.chunked_head import leave_to_loss
from tpshard.models.transformers import (
    attention_interface,
    class_names,
    dynamic_rope,
    patch_attention,
    patch_experts,
    patch_recurrences,
    state_cache,
)
from tpshard.models.transformers.chunked_attention import chunk_of

OWN_TASK = (
    "as a `model.module`, a subclass whose `inputs` are those of a task of your own is trained, quantized and evaluated"
)
"""The fix for a class that is no model of one text."""


@dataclass(frozen=True)
class Architecture:
    """A causal language model of transformers, described by its config.json."""

    raw: Mapping[str, Any]
    """The contents of config.json without `quantization_config`: the module computes with dense weights."""

    @staticmethod
    def of(folder: str | os.PathLike[str]) -> Architecture:
        """The architecture of a folder.

        ValueError where it needs remote code, is quantized other than by GPTQ, or transformers lacks its model.
        """
        raw = hf_config.read_raw(folder)
        gptq_config.read_config(Path(folder))  # raises
        architecture = Architecture({key: value for key, value in raw.items() if key != "quantization_config"})
        architecture.config  # noqa: B018 (raises)
        return architecture

    @property
    def model_type(self) -> str:
        return str(self.raw.get("model_type"))

    @cached_property
    def cls(self) -> Any:
        """The transformers class that `architectures` names."""
        import transformers

        name = class_names.class_name(self.raw)
        named_class = getattr(transformers, name, None)
        if not (isinstance(named_class, type) and issubclass(named_class, transformers.PreTrainedModel)):
            raise class_names.no_class(name)
        return named_class

    @cached_property
    def config(self) -> Any:
        """transformers' configuration object."""
        try:
            config = self.cls.config_class.from_dict(_with_infinities(dict(self.raw)))
        except Exception as error:  # the class may raise anything for bad numbers
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"config.json: {self.cls.config_class.__name__} refuses it: {reason}") from error
        text = config.get_text_config()
        window, types = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
        if window is not None and window < 1 and (not types or "sliding_attention" in types):
            raise ValueError(
                f"config.json: with `sliding_window: {window}`, as {type(text).__name__} reads it, no token of a layer "
                "with a window sees a key; null is no window, and some classes have one only with `use_sliding_window`"
            )
        return config

    @property
    def vocab(self) -> int | None:
        """The size of the vocabulary, or None where config.json does not say it."""
        size = getattr(self.config.get_text_config(), "vocab_size", None)
        return None if size is None else int(size)

    @property
    def heads(self) -> tuple[int, int, int] | None:
        """(query heads, KV heads, size of a head); None where config.json does not say, or layers differ in them."""
        config = self.config.get_text_config()
        differ = getattr(config, "per_layer_attributes", None) or set()
        if differ & {"num_attention_heads", "num_key_value_heads", "head_dim"}:
            return None
        heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
        if heads is None or width is None:
            return None
        few = getattr(config, "num_key_value_heads", None) or heads
        return int(heads), int(few), int(getattr(config, "head_dim", None) or width // heads)

    @property
    def kind(self) -> str:
        """The dtype as recipes write it: fp32, bf16 or fp16."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.dtype, "fp32")

    @property
    def max_seq(self) -> int | None:
        """The longest sequence that the model supports, or None where config.json does not say it."""
        size = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return None if size is None else int(size) - self.first_position

    @cached_property
    def first_position(self) -> int:
        """The position id of a document's first token. RoBERTa and its like count from the id of padding on."""
        parts = vars(sys.modules[self.cls.__module__]).values()
        if not any(hasattr(part, "create_position_ids_from_input_ids") for part in parts):
            return 0
        return int(self.config.get_text_config().pad_token_id) + 1

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, by name."""
        return {name: tuple(parameter.shape) for name, parameter in self.build().named_parameters()}

    def own_dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The parameters that the class keeps in fp32 in a model of another dtype, such as routers' weights."""
        model: Any = self.build()
        patterns = set(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.bfloat16, torch.float16) else set()
        patterns |= set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
        expressions = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
        return {name: torch.float32 for name in self.shapes if any(e.search(name) for e in expressions)}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that config.json names; fp32 where it names none."""
        named = str(self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32")
        torch_dtype = getattr(torch, named.removeprefix("torch."), None)
        return torch_dtype if isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point else torch.float32

    @property
    def attends(self) -> bool:
        """Whether attention goes through transformers' attention interface, which lets tpshard's operation replace
        it."""
        return bool(getattr(self.cls, "_supports_attention_backend", False))

    @property
    def selects_keys(self) -> bool:
        """Whether modules select the keys of each query under an explicit mask: by an indexer (DeepSeek-V3.2), or in
        sequences of more keys than they keep (Doge)."""
        config = self.config.get_text_config()
        return any(getattr(config, key, None) is not None for key in ("index_topk", "keep_window_size"))

    @property
    def recurrent(self) -> bool:
        """Whether some layers carry a state from token to token (Mamba, gated DeltaNet)."""
        return state_cache.are_recurrent(self.config)

    @property
    def chunk(self) -> int | None:
        """The number of tokens within which some layers attend (Llama 4); None without such layers."""
        config = self.config.get_text_config()
        layers = range(len(getattr(config, "layer_types", None) or ()))
        return next((chunk for layer in layers if (chunk := chunk_of(config, layer)) is not None), None)

    @property
    def original_seq(self) -> int | None:
        """The sequence length above which the rotary frequencies change (longrope, dynamic NTK); None if they never
        do."""
        return dynamic_rope.original_length(self.config.get_text_config())

    def notes(self, model: nn.Module) -> list[str]:
        """Sentences on differences from the authors' training: dropout, auxiliary losses, documents that interact."""
        notes = training_notes(self.config.get_text_config().to_dict())
        if not self.attends and not patch_attention.took_place(model):
            notes.append(f"{self.cls.__name__} mixes tokens by itself: documents in one row may attend to each other")
        elif others := _mixers(model):
            notes.append(
                f"{', '.join(others)} mixes tokens outside of attention: documents in one row reach each other"
            )
        return notes

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The module: tokens, documents, positions, all [batch, seq] int64 -> logits [batch, seq, vocab].

        Parameters are on `meta`, in `dtype`. Buffers that no folder stores (rotary frequencies) have their values, in
        the dtype that transformers gives them in a model of `dtype`; those that a folder stores are parameters without
        a gradient, which training leaves as they are. ValueError where these are integers, or where the class is no
        language model of one text.
        """
        attention_interface.register()
        config = copy.deepcopy(self.config)
        config._attn_implementation = attention_interface.NAME if self.attends else "eager"
        config._experts_implementation = attention_interface.NAME
        for part in (config, config.get_text_config()):
            if getattr(part, "output_router_logits", False):
                part.output_router_logits = False  # only their loss, which is not added, needs them
        try:
            with torch.device("meta"), _default_dtype(dtype if dtype.itemsize == 2 else torch.get_default_dtype()):
                model: nn.Module = self.cls(config)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{self.cls.__name__} cannot be built from config.json: {reason}") from error
        _hold_buffers(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
        _fill_buffers(model)
        model.eval()
        self._as_language_model(model)
        _name_residuals(model)
        return model

    def _as_language_model(self, model: nn.Module) -> None:
        """Gives the model tpshard's signature for language models; parameters keep their names."""
        name, takes = type(model).__name__, inspect.signature(type(model).forward).parameters
        if "input_ids" not in takes or "labels" not in takes or model.get_output_embeddings() is None:  # type: ignore[operator]
            raise FolderError(
                f"{name} is no language model: it takes no `input_ids` with `labels`, or has no head of logits",
                OWN_TASK,
            )
        if getattr(model.config, "is_encoder_decoder", False):
            message = f"{name} is an encoder with a decoder, which read two texts: a recipe gives a model one"
            raise FolderError(message, OWN_TASK)
        further, first = {"use_cache": False} if "use_cache" in takes else {}, self.first_position
        types = getattr(self.config.get_text_config(), "layer_types", None)
        window = None if types else getattr(self.config.get_text_config(), "sliding_window", None)
        step = patch_attention.take_place(model, attention_interface.NAME, hybrid=self.recurrent and not self.attends)
        patch_experts.take_place(model)
        leave_to_loss(model.get_output_embeddings())  # type: ignore[operator]
        dynamic_rope.take_place(model, step)

        def transformers_inputs(
            tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
        ) -> dict[str, Any]:
            named: dict[str, Any] = {"input_ids": tokens, **further}
            if "position_ids" in takes:
                named["position_ids"] = positions if positions is None or not first else positions + first
            if self.attends:
                named["documents"] = documents
                if self.selects_keys:
                    named["attention_mask"] = step.mask = attention_interface.explicit_mask(tokens, documents, window)
            if step.cache is not None:
                named[state_cache.cache_argument(model)] = step.cache
            step.documents, step.positions = documents, positions
            step.length = tokens.shape[1] if step.longest is None else step.longest
            return named

        def logits(_: nn.Module, __: Any, output: Any) -> Tensor:
            step.documents = step.positions = step.mask = None
            return output.logits  # type: ignore[no-any-return]

        model.forward = partial(_with_own_functions, model, model.forward)
        model.register_forward_pre_hook(
            lambda _, args, kwargs: ((), transformers_inputs(*args, **kwargs)), with_kwargs=True
        )
        model.register_forward_hook(logits)


def _name_residuals(model: nn.Module) -> None:
    """Names what each layer returns `residual`, as tpshard's families do, so that recipes can annotate it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    def named(_: nn.Module, __: Any, output: Any) -> Any:
        first, *others = output if isinstance(output, tuple) else (output,)
        if not isinstance(first, Tensor) or first.dim() != 3:
            return output
        first = dims.name(first, "residual", "batch", "seq", "embed")
        return (first, *others) if isinstance(output, tuple) else first

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_hook(named)


def _with_own_functions(model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a forward method with tpshard's recurrences, and otherwise with torch's own operations, where a class would
    call the kernels of another package.

    A program cannot be captured from these. transformers makes the same choice, without advice to install them, where
    it exports or compiles a model.
    """
    from transformers.integrations import hub_kernels

    exporting = mock.patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True, create=True)
    compiling = mock.patch.object(hub_kernels, "is_torchdynamo_compiling", lambda: True, create=True)
    with exporting, compiling, patch_recurrences.replaced(model):
        return forward(*args, **kwargs)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context in which tensors of no named dtype have this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _with_infinities(value: Any) -> Any:
    """The values of config.json, with those that transformers writes as {"__float__": "Infinity"} as numbers."""
    if isinstance(value, list):
        return [_with_infinities(each) for each in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"__float__"}:
        return float(value["__float__"])
    return {key: _with_infinities(each) for key, each in value.items()}


def _mixers(model: nn.Module) -> list[str]:
    """The classes of modules besides attention that mix a row's tokens: by convolution or lightning attention."""
    mixers = [
        type(module).__name__
        for module in model.modules()
        if "LightningAttention" in type(module).__name__
        or any(isinstance(part, nn.Conv1d) for part in module.children())
    ]
    return list(dict.fromkeys(mixers))


def _hold_buffers(model: nn.Module) -> None:
    """Turns the buffers that checkpoints store, such as the biases of DeepSeek's routers, into parameters without a
    gradient, which the forward pass reads detached."""
    owned = [(path, module, name) for path, module in model.named_modules() for name in module._buffers]
    stored = set(model.state_dict())
    held: list[tuple[nn.Module, str]] = []
    for path, module, name in owned:
        label, buffer = f"{path}.{name}", module._buffers[name]
        if buffer is None or label not in stored:
            continue
        if not buffer.is_floating_point():
            raise ValueError(
                f"{type(model).__name__} stores the buffer `{label}` of {buffer.dtype}, whose values only a folder "
                "has, and checkpoints hold fp32, bf16 and fp16 alone; as a `model.module`, a subclass that registers "
                "it with its values and `persistent=False` is computed"
            )
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(torch.empty_like(buffer, device="meta"), requires_grad=False))
        held.append((module, name))

    def detach(*_: Any) -> None:
        present = set(model.modules())  # layers may have been removed
        for module, name in held:
            if module not in present:
                continue
            module._parameters[name] = module._parameters[name].detach()  # type: ignore[union-attr, assignment]

    if held:
        model.register_forward_pre_hook(detach)


def _fill_buffers(model: nn.Module) -> None:
    """Computes the buffers that checkpoints do not store, by the class's own initialization or constructor, and tensors
    that are plain attributes."""
    constructed: dict[str, Tensor] = {}
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
                constructed = constructed or _constructed(model)
                own = constructed[f"{path}.{name}"]  # some classes fill a buffer only there
                module._buffers[name] = own.to(buffer.dtype)  # type: ignore[union-attr]
    for path, module in model.named_modules():
        for name in [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]:
            constructed = constructed or _constructed(model)
            setattr(module, name, constructed[f"{path}.{name}"])


def _constructed(model: nn.Module) -> dict[str, Tensor]:
    """The buffers and other tensors as the constructor of the model's class leaves them, by name. Parameters take no
    memory."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.to("meta"), False))

    try:
        with mock.patch.object(nn.Module, "register_parameter", on_meta):
            constructed = type(model)(model.config)
    except Exception as error:  # the class may do anything with tensors that have values
        raise ValueError(f"{type(model).__name__} cannot compute its buffers: {error}") from error
    plain = {
        f"{path}.{name}": value
        for path, module in constructed.named_modules()
        for name, value in vars(module).items() if isinstance(value, Tensor)
    }  # fmt: skip
    return plain | dict(constructed.named_buffers())
