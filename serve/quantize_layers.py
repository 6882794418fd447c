"""Quantizing a model layer by layer, from its dense values and some text to a GPTQ folder and a report.

One layer is in memory at a time. Three streams of activations pass through the model: the calibration text through the
layers quantized so far, so that each layer is fitted to its actual inputs, and held-out text through the dense and
through the quantized layers, so that both losses come from the same pass.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
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
from tpshard.serve.layer_calls import (
    CallCatcher,
    LayerCall,
    LayerCaught,
    OutputReplay,
    expert_inputs,
    input_of,
    shared_inputs,
    through,
)

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
    """The modules in the folder whose sizes GPTQ cannot hold; `*` stands for the number of an expert."""
    unseen: list[str] = field(default_factory=list)
    """The experts' linears that no token of the calibration text reached, rounded to nearest."""
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
        config = replace(config, capacity=None)  # a server drops no tokens
        self.config, self.read, self.settings, self.order = config, read, settings, order
        self.method, self.device, self.dtype, self.step = method, device, dtype, step
        self.calibration = calibration.to(device).split(rows)
        self.held_out = held_out.to(device).split(rows) if held_out is not None else []
        self.model = build(config, device="meta", dtype=dtype)
        self.layers: nn.ModuleList = self.model.layers  # type: ignore[assignment]
        self.parameters = config.shapes
        self.report = Quantizing(settings.bits, settings.group_size, order, method)
        self.homes = hf_modules(config)
        matrices = {
            name: leaf
            for name, leaf in config.leaves.items()
            if name.startswith("layers.") and leaf.kind in ("linear", "experts")
        }
        fits = quantizable(config)
        self.fits = {name: f"{name}.weight" in fits for name in matrices}
        routers = {name for name, leaf in matrices.items() if "choice" in leaf.dims}
        times = {name: (config.experts or 0) if leaf.kind == "experts" else 1 for name, leaf in matrices.items()}
        self.count = sum(count for name, count in times.items() if name not in routers)
        dense = {name: self.homes[name].module.format("*") for name, fits in self.fits.items() if not fits}
        self.dense_modules = sorted(set(dense.values()))
        self.report.left_dense = sorted({module for name, module in dense.items() if name not in routers})

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
                    streams[name] = [through(dense, x) for x in streams[name]]
            for name in ("calibration", "quantized"):
                if name in streams:
                    streams[name] = [through(layer, x) for x in streams[name]]
            layer.to("meta")
            yield from self._join(quantized)
        if self.held_out:
            before, self.report.held_out_tokens = self._loss(streams["dense"])
            after, _ = self._loss(streams["quantized"])
            self.report.loss_before, self.report.loss_after = before, after

    def dense(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (tensor's name in the folder, fp16 values) of everything that is not quantized."""
        names = [name for name in self.parameters if not self.fits.get(name.rpartition(".")[0])]
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

    def _inputs(self, batches: Sequence[Sequences]) -> list[LayerCall]:
        """The calls of the first layer, one per batch."""
        catcher = CallCatcher()
        self.model.layers = nn.ModuleList([catcher])
        for batch in batches:
            try:
                self.model(batch.tokens, batch.documents, batch.positions)
            except LayerCaught:
                continue
        return catcher.calls

    def _loss(self, calls: Sequence[LayerCall]) -> tuple[float, int]:
        total, count = 0.0, 0
        for batch, call in zip(self.held_out, calls):
            self.model.layers = nn.ModuleList([OutputReplay(call.x)])
            logits = self.model(batch.tokens, batch.documents, batch.positions)
            some, tokens = cross_entropy_sum(logits, batch.targets)
            total, count = total + float(some), count + int(tokens)
        return total / max(count, 1), count

    def _quantize_layer(
        self,
        layer: nn.Module,
        prefix: str,
        calls: Sequence[LayerCall],
        dense: nn.Module,
        references: Sequence[LayerCall],
    ) -> dict[str, Quantized]:
        """Quantizes a layer. Linears with one input share Hessian and order; later ones see earlier ones quantized."""
        quantized: dict[str, Quantized] = {}
        for together in shared_inputs(layer, calls[0]):
            names = [name for name in together if self.fits.get(prefix + name)]
            if not names:
                continue
            linears = {prefix + name: layer.get_submodule(name) for name in names}
            weights = {name: linear.weight.detach() for name, linear in linears.items()}  # type: ignore[union-attr, operator]
            statistics = Hessian(weights[prefix + names[0]].shape[1], self.device)
            for call, reference in zip(calls, references):
                statistics.add(input_of(layer, names[0], call), input_of(dense, names[0], reference))
            for name, result in self._solve(weights, statistics, self._heads(layer, names[0])).items():
                linear, bias = linears[name], getattr(linears[name], "bias", None)
                linear.weight = nn.Parameter(self._dense_form(result), requires_grad=False)
                quantized[name] = result if bias is None else replace(result, bias=bias.detach().to(torch.float16))
        if self.fits.get(f"{prefix}mlp.experts.down"):
            quantized |= self._quantize_experts(layer, prefix, calls, dense, references)
        return quantized

    def _quantize_experts(
        self,
        layer: nn.Module,
        prefix: str,
        calls: Sequence[LayerCall],
        dense: nn.Module,
        references: Sequence[LayerCall],
    ) -> dict[str, Quantized]:
        """Quantizes a layer's experts, each for the tokens that choose it, by names with the expert's number."""
        seen = [expert_inputs(layer, call) for call in calls]
        x, ids = (torch.cat(parts) for parts in zip(*seen))
        dense_x = torch.cat([expert_inputs(dense, reference)[0] for reference in references])
        own, originals = (_expert_weights(one) for one in (layer, dense))
        quantized: dict[str, Quantized] = {}

        def quantize(expert: int, leaves: Sequence[str], inputs: Tensor, dense_inputs: Tensor) -> None:
            statistics = Hessian(inputs.shape[1], self.device)
            statistics.add(inputs, dense_inputs)
            names = {f"{prefix}mlp.experts.{leaf}[{expert}]": leaf for leaf in leaves}
            results = self._solve({name: own[leaf][expert] for name, leaf in names.items()}, statistics)
            for name, result in results.items():
                own[names[name]][expert] = self._dense_form(result)
            quantized.update(results)
            self.report.unseen += [] if len(inputs) else names

        for e in range(len(own["gate"])):
            chosen = (ids == e).any(-1)
            inputs, dense_inputs = x[chosen], dense_x[chosen]
            quantize(e, ("gate", "up"), inputs, dense_inputs)
            quantize(e, ("down",), _hidden(inputs, own, e), _hidden(dense_inputs, originals, e))
        return quantized

    def _solve(
        self, weights: Mapping[str, Tensor], statistics: Hessian, heads: Heads | None = None
    ) -> dict[str, Quantized]:
        """Quantizes weights [outputs, inputs] that have one input. ValueError names the weight."""
        quantized, name = dict[str, Quantized](), next(iter(weights))
        try:
            plan = ordering(statistics.mean().diagonal(), self.settings, self.order, heads)
            for name, weight in weights.items():
                quantized[name] = self._quantize_weight(weight, name, statistics, plan)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        return quantized

    def _quantize_weight(self, values: Tensor, name: str, statistics: Hessian, plan: Ordering) -> Quantized:
        self.step(len(self.report.linears), self.count, name)
        began = time.monotonic()
        weight = values.float()
        quantized = nearest = round_to_nearest(weight, self.settings)
        hessian = statistics.mean()
        if self.method == "gptq":
            target = compensate(weight, hessian, statistics.cross(), self.settings.damp)
            quantized = solve(target, hessian, self.settings, plan)
        error, nearest_error = (relative_error(weight, q, hessian) for q in (quantized, nearest))
        outputs, inputs = weight.shape
        seconds = time.monotonic() - began
        self.report.linears.append(LinearResult(name, (outputs, inputs), error, nearest_error, seconds))
        return quantized

    def _dense_form(self, quantized: Quantized) -> Tensor:
        """The weight [outputs, inputs] that a quantized one stands for, in the dtype of the activations."""
        return quantized.dequantize().T.to(self.dtype).contiguous()

    def _heads(self, layer: nn.Module, name: str) -> Heads | None:
        dims: Mapping[str, tuple[str, ...]] = getattr(layer.get_submodule(name), "dims", {})
        c = self.config
        return Heads(c.heads, c.kv_heads, c.head_dim) if dims.get("weight", ())[1:] == ("heads",) else None

    def _join(self, quantized: Mapping[str, Quantized]) -> Iterator[tuple[str, Quantized]]:
        """The linears as the folder stores them: those that share a matrix side by side, in its order of outputs."""
        shared: dict[str, list[tuple[str, Home]]] = {}
        for name in quantized:
            stack, _, expert = name.partition("[")
            home = self.homes[stack]
            shared.setdefault(home.module.format(expert.rstrip("]")), []).append((name, home))
        for module, parts in shared.items():
            parts.sort(key=lambda part: part[1].part[2] if part[1].part else 0)
            start, rows = 0, []
            for name, home in parts:
                rows.append((torch.arange(start, start + quantized[name].outputs), home))
                start += quantized[name].outputs
            joined = quantized[parts[0][0]] if len(parts) == 1 else concatenate([quantized[name] for name, _ in parts])
            yield module, joined.to("cpu").take_columns(fuse(rows))


def _expert_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The stacked weights of a layer's experts, in memory of their own, which the layer reads."""
    weights = {}
    for leaf in ("gate", "up", "down"):
        stack = layer.get_submodule(f"mlp.experts.{leaf}")
        weights[leaf] = stack.weight.detach().clone()  # type: ignore[union-attr, operator]
        stack.weight = nn.Parameter(weights[leaf], requires_grad=False)
    return weights


def _hidden(x: Tensor, weights: Mapping[str, Tensor], expert: int) -> Tensor:
    """The values between gate, up and down of an expert: x [tokens, embed] -> [tokens, mlp]."""
    return F.silu(F.linear(x, weights["gate"][expert])) * F.linear(x, weights["up"][expert])


def _pattern(module: str) -> str:
    """A regular expression for a module's name, in which `*` stands for a number."""
    return re.escape(module).replace(r"\*", r"\d+")


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
        dynamic={f"-:{_pattern(module)}$": {} for module in quantizer.dense_modules},
    )
    model = write_config(replace(config, dtype="fp16"), "fp16", token_ids)
    with write_aside(out, overwrite=overwrite) as folder:
        write_into(folder, model, quantizer.run(), quantizer.dense(), gptq)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder)
    return quantizer.report
