"""Quantizing a model layer by layer, from its dense values and some text to a GPTQ folder and a report.

One layer is in memory at a time. Three streams of activations pass through the model: the calibration text through the
layers quantized so far, so that each layer is fitted to its actual inputs, and held-out text through the dense and
through the quantized layers, so that both losses come from the same pass.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tpshard.kernels.gptq_config import GPTQConfig
from tpshard.kernels.gptq_format import write_into
from tpshard.kernels.gptq_solver import (
    Heads,
    Hessian,
    Order,
    Ordering,
    Settings,
    compensate,
    ordering,
    relative_error,
    round_to_nearest,
    solve,
)
from tpshard.kernels.quantized import Quantized, concatenate
from tpshard.models import build
from tpshard.models.aside import write_aside
from tpshard.models.config import ModelConfig
from tpshard.models.hf import copy_tokenizer
from tpshard.models.hf_config import write_config
from tpshard.models.hf_names import Home, fuse, hf_modules, hf_tensors
from tpshard.models.hf_quantized import quantizable
from tpshard.models.loss import cross_entropy_sum

Method = Literal["gptq", "nearest"]


@dataclass(frozen=True)
class Sequences:
    """Text as rows of tokens, all [sequences, seq] int64. `targets` is -100 where there is none."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None
    positions: Tensor | None = None

    def split(self, rows: int) -> list[Sequences]:
        """The sequences in parts of at most `rows`."""
        parts = [None if t is None else t.split(rows) for t in (self.documents, self.positions)]
        return [
            Sequences(tokens, targets, *(None if p is None else p[i] for p in parts))
            for i, (tokens, targets) in enumerate(zip(self.tokens.split(rows), self.targets.split(rows)))
        ]

    def to(self, device: torch.device | str) -> Sequences:
        tensors = (self.tokens, self.targets, self.documents, self.positions)
        tokens, targets, documents, positions = (None if t is None else t.to(device) for t in tensors)
        assert tokens is not None and targets is not None
        return Sequences(tokens, targets, documents, positions)


@dataclass(frozen=True)
class LinearResult:
    """The errors of one quantized linear, ||(W - Q) X|| / ||W X|| over the calibration text."""

    name: str
    shape: tuple[int, int]
    error: float
    nearest_error: float
    """The error of round-to-nearest, for comparison."""
    seconds: float


@dataclass
class Quantizing:
    """The report of quantizing, complete after the last layer. Losses are in nats per token of held-out text."""

    bits: int
    group_size: int
    order: str
    method: str
    linears: list[LinearResult] = field(default_factory=list)
    left_dense: list[str] = field(default_factory=list)
    loss_before: float | None = None
    loss_after: float | None = None
    held_out_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        rows = [{"name": x.name, "shape": list(x.shape), "error": x.error, "nearest_error": x.nearest_error,
                 "seconds": x.seconds} for x in self.linears]  # fmt: skip
        return {**vars(self), "linears": rows}


class Quantizer:
    """Quantizes a model, one layer per iteration of `run`.

    Args:
        config: the model; `read(name)` returns a parameter's dense values.
        calibration, held_out: text; without held_out no losses are computed.
        order: see `gptq_solver.ordering`.
        method: `nearest` is the baseline, round-to-nearest with the same groups.
        dtype: of the activations; weights are solved in fp32.
        step: called before each linear with (done, of, name).

    Raises ValueError, naming the layer, where values are not finite or do not fit the settings.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: Callable[[str], Tensor],
        calibration: Sequences,
        held_out: Sequences | None,
        settings: Settings,
        order: Order,
        *,
        method: Method = "gptq",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        rows: int = 8,
        step: Callable[[int, int, str], None] = lambda done, of, name: None,
    ):
        self.config, self.read, self.settings, self.order = config, read, settings, order
        self.method, self.device, self.dtype, self.step = method, device, dtype, step
        self.calibration = calibration.to(device).split(rows)
        self.held_out = held_out.to(device).split(rows) if held_out is not None else []
        self.model = build(config, device="meta", dtype=dtype)
        self.layers: nn.ModuleList = self.model.layers  # type: ignore[assignment]
        self.parameters = config.shapes
        self.report = Quantizing(settings.bits, settings.group_size, order, method)
        self.homes = hf_modules(config)
        self.plans: dict[str, Ordering] = {}
        self.linears = [name for name, module in self.model.named_modules() if _is_linear(name, module)]
        fits = quantizable(config)
        self.fits = {self.homes[name].module: f"{name}.weight" in fits for name in self.linears}
        self.report.left_dense = sorted(home for home, fits in self.fits.items() if not fits)

    @torch.no_grad()
    def run(self) -> Iterator[tuple[str, Quantized]]:
        """Yields (module's name in the folder, its quantized linear), layer by layer."""
        layers = list(self.layers)
        self._load(self.model, "", skip="layers.")
        streams = {"calibration": self._inputs(self.calibration)}
        streams["reference"] = list(streams["calibration"])
        if self.held_out:
            streams["dense"] = self._inputs(self.held_out)
            streams["quantized"] = list(streams["dense"])
        for i, layer in enumerate(layers):
            prefix = f"layers.{i}."
            self._load(layer, prefix)
            dense = copy.deepcopy(layer)
            quantized = self._quantize_layer(layer, prefix, streams["calibration"], dense, streams["reference"])
            for name in ("reference", "dense"):
                if name in streams:
                    streams[name] = [_through(dense, x) for x in streams[name]]
            for name in ("calibration", "quantized"):
                if name in streams:
                    streams[name] = [_through(layer, x) for x in streams[name]]
            layer.to("meta")
            yield from self._join(quantized)
        if self.held_out:
            before, self.report.held_out_tokens = self._loss(streams["dense"])
            after, _ = self._loss(streams["quantized"])
            self.report.loss_before, self.report.loss_after = before, after

    def dense(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (tensor's name in the folder, fp16 values) of everything that is not quantized."""
        quantized = {name for name in self.linears if self.fits[self.homes[name].module]}
        names = [name for name in self.parameters if name.rpartition(".")[0] not in quantized]
        for tensor, parts in hf_tensors(self.config, names).items():
            value = fuse([(self.read(parameter), home) for parameter, home in parts]).to(torch.float16)
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{tensor} holds values that are not finite in fp16")
            yield tensor, value

    def _load(self, module: nn.Module, prefix: str, skip: str | None = None) -> None:
        for name, parameter in list(module.named_parameters()):
            if skip is None or not name.startswith(skip):
                value = self.read(prefix + name)
                if not bool(torch.isfinite(value).all()):
                    raise ValueError(f"{prefix}{name} holds values that are not finite")
                owner, _, leaf = name.rpartition(".")
                loaded = nn.Parameter(value.to(self.device, self.dtype), requires_grad=parameter.requires_grad)
                setattr(module.get_submodule(owner), leaf, loaded)

    def _inputs(self, batches: Sequence[Sequences]) -> list[_Call]:
        """The calls of the first layer, one per batch."""
        catcher = _Catcher()
        self.model.layers = nn.ModuleList([catcher])
        for batch in batches:
            try:
                self.model(batch.tokens, batch.documents, batch.positions)
            except _Caught:
                continue
        return catcher.calls

    def _loss(self, calls: Sequence[_Call]) -> tuple[float, int]:
        total, count = 0.0, 0
        for batch, call in zip(self.held_out, calls):
            self.model.layers = nn.ModuleList([_Replay(call.x)])
            logits = self.model(batch.tokens, batch.documents, batch.positions)
            some, tokens = cross_entropy_sum(logits, batch.targets)
            total, count = total + float(some), count + int(tokens)
        return total / max(count, 1), count

    def _quantize_layer(
        self, layer: nn.Module, prefix: str, calls: Sequence[_Call], dense: nn.Module, references: Sequence[_Call]
    ) -> dict[str, Quantized]:
        """Quantizes a layer. Linears with one input share Hessian and order; later ones see earlier ones quantized."""
        quantized: dict[str, Quantized] = {}
        for together in _shared_inputs(layer, calls[0]):
            names = [name for name in together if self.fits[self.homes[prefix + name].module]]
            if not names:
                continue
            statistics = self._hessian(names[0], layer, calls, dense, references)
            hessian, name = statistics.mean(), names[0]
            try:
                plan = ordering(hessian.diagonal(), self.settings, self.order, self._heads(layer, name))
                for name in names:
                    linear = layer.get_submodule(name)
                    quantized[prefix + name] = self._quantize_linear(linear, prefix + name, statistics, plan)
            except ValueError as error:
                raise ValueError(f"{prefix}{name}: {error}") from error
        return quantized

    def _quantize_linear(self, linear: nn.Module, name: str, statistics: Hessian, plan: Ordering) -> Quantized:
        self.step(len(self.report.linears), len(self.linears), name)
        began = time.monotonic()
        weight: Tensor = linear.weight.detach().float()  # type: ignore[union-attr, operator]
        quantized = nearest = round_to_nearest(weight, self.settings)
        hessian = statistics.mean()
        if self.method == "gptq":
            target = compensate(weight, hessian, statistics.cross(), self.settings.damp)
            quantized = solve(target, hessian, self.settings, plan)
        linear.weight = nn.Parameter(quantized.dequantize().T.to(self.dtype).contiguous(), requires_grad=False)
        error, nearest_error = (relative_error(weight, q, hessian) for q in (quantized, nearest))
        outputs, inputs = weight.shape
        seconds = time.monotonic() - began
        self.report.linears.append(LinearResult(name, (outputs, inputs), error, nearest_error, seconds))
        bias = getattr(linear, "bias", None)
        return quantized if bias is None else replace(quantized, bias=bias.detach().to(torch.float16))

    def _hessian(
        self, name: str, layer: nn.Module, calls: Sequence[_Call], dense: nn.Module, references: Sequence[_Call]
    ) -> Hessian:
        weight: Tensor = layer.get_submodule(name).weight  # type: ignore[assignment]
        hessian = Hessian(weight.shape[1], self.device)
        for call, reference in zip(calls, references):
            hessian.add(_input_of(layer, name, call), _input_of(dense, name, reference))
        return hessian

    def _heads(self, layer: nn.Module, name: str) -> Heads | None:
        dims: Mapping[str, tuple[str, ...]] = getattr(layer.get_submodule(name), "dims", {})
        c = self.config
        return Heads(c.heads, c.kv_heads, c.head_dim) if dims.get("weight", ())[1:] == ("heads",) else None

    def _join(self, quantized: Mapping[str, Quantized]) -> Iterator[tuple[str, Quantized]]:
        """The linears as the folder stores them: those that share a matrix side by side, in its order of outputs."""
        shared: dict[str, list[tuple[str, Home]]] = {}
        for name in quantized:
            shared.setdefault(self.homes[name].module, []).append((name, self.homes[name]))
        for module, parts in shared.items():
            parts.sort(key=lambda part: part[1].part[2] if part[1].part else 0)
            start, rows = 0, []
            for name, home in parts:
                rows.append((torch.arange(start, start + quantized[name].outputs), home))
                start += quantized[name].outputs
            joined = quantized[parts[0][0]] if len(parts) == 1 else concatenate([quantized[name] for name, _ in parts])
            yield module, joined.to("cpu").take_columns(fuse(rows))


class _Caught(Exception):
    """Ends a forward pass early, once the needed values are captured."""


@dataclass(frozen=True)
class _Call:
    """The arguments of a layer: the residual stream, and others passed unchanged."""

    x: Tensor
    rest: tuple[Any, ...]
    named: Mapping[str, Any]

    def into(self, layer: nn.Module) -> Tensor:
        return layer(self.x, *self.rest, **self.named)  # type: ignore[no-any-return]


class _Catcher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        self.calls.append(_Call(x, rest, named))
        raise _Caught


class _Replay(nn.Module):
    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x

    def forward(self, *rest: Any, **named: Any) -> Tensor:
        return self.x


def _input_of(layer: nn.Module, name: str, call: _Call) -> Tensor:
    """The input of the linear `name` when the layer is called."""
    inputs: list[Tensor] = []

    def see(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(arguments[0])
        raise _Caught  # the rest of the layer is not needed

    handle = layer.get_submodule(name).register_forward_pre_hook(see)
    try:
        call.into(layer)
    except _Caught:
        pass
    finally:
        handle.remove()
    return inputs[0]


def _through(layer: nn.Module, call: _Call) -> _Call:
    return replace(call, x=call.into(layer))


def _is_linear(name: str, module: nn.Module) -> bool:
    """Whether a module is a matrix inside the layers, which excludes embedding, norms and head."""
    weight = getattr(module, "weight", None)
    return name.startswith("layers.") and isinstance(weight, Tensor) and weight.dim() == 2


def _shared_inputs(layer: nn.Module, call: _Call) -> list[list[str]]:
    """The layer's linears in the order they run, grouped by their input."""
    order: list[tuple[str, Tensor]] = []
    handles = [
        module.register_forward_pre_hook(lambda _, arguments, name=name: order.append((name, arguments[0])))
        for name, module in layer.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 2
    ]
    try:
        call.into(layer)
    finally:
        for handle in handles:
            handle.remove()
    together: list[list[str]] = []
    last: Tensor | None = None
    for name, x in order:
        if x is last:
            together[-1].append(name)
        else:
            together.append([name])
        last = x
    return together


def write(
    quantizer: Quantizer,
    out: str | Path,
    *,
    tokenizer: Path | None = None,
    token_ids: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Quantizing:
    """Quantizes the model and writes the folder, complete or not at all.

    FileExistsError if `out` is not empty, OSError if it cannot be written, ValueError as for `Quantizer`.
    """
    settings, config = quantizer.settings, quantizer.config
    gptq = GPTQConfig(
        bits=settings.bits,
        group_size=settings.group_size,
        desc_act=quantizer.order != "none" and quantizer.method == "gptq" and not settings.static_groups,
        sym=settings.sym,
        static_groups=settings.static_groups,
        damp_percent=settings.damp,
        dynamic={f"-:{home.replace('.', chr(92) + '.')}$": {} for home in quantizer.report.left_dense},
    )
    model = write_config(replace(config, dtype="fp16"), "fp16", token_ids)
    with write_aside(out, overwrite=overwrite) as folder:
        write_into(folder, model, quantizer.run(), quantizer.dense(), gptq)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder)
    return quantizer.report
