"""Quantizing a model layer by layer, from its dense values and some text to a GPTQ folder and a report.

One layer is in memory at a time. Calibration and held-out text each pass through the dense and through the quantized
layers. Each layer is fitted to its inputs from the quantized layers before it, with the dense outputs as the target.
The held-out text gives the loss before and after quantizing.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.kernels.quantized.gptq_solver import (
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
from tpshard.kernels.quantized.quantized import Quantized
from tpshard.models.layered.layered_model import ExpertMatrices, NotQuantizable, Read
from tpshard.models.model_spec import ModelSpec
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.serve.quantizing.layer_calls import (
    CallCatcher,
    Form,
    LayerCall,
    LayerCaught,
    OutputReplay,
    calls_of_layers,
    expert_inputs,
    form_of,
    in_place_of,
    input_of,
    joined_heads,
    shared_inputs,
)
from tpshard.serve.quantizing.quantize_report import LinearResult, Quantizing

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


class Quantizer:
    """Quantizes a model, one layer per iteration of `run`.

    Args:
        spec: the model; `read(name)` returns a parameter's dense values.
        calibration, held_out: text; without held_out no losses are computed.
        order: see `gptq_solver.ordering`.
        method: `nearest` is the baseline, round-to-nearest with the same groups.
        dtype: of the activations; weights are solved in fp32.
        step: called before each linear with (done, of, name).

    Raises ValueError, naming the layer, where values are not finite or do not fit the settings, and as
    `ModelSpec.layered`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        read: Read,
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
        self.read, self.settings, self.order = read, settings, order
        self.method, self.device, self.dtype, self.step = method, device, dtype, step
        self.calibration = calibration.to(device).split(rows)
        self.held_out = held_out.to(device).split(rows) if held_out is not None else []
        self.layered = spec.layered(dtype)
        self.model, self.path = self.layered.model, self.layered.layers
        self.report = Quantizing(settings.bits, settings.group_size, order, method)
        matrices = self.layered.matrices
        self.fits = {name: matrix.fits and not matrix.router for name, matrix in matrices.items()}
        self.count = sum(matrices[name].count for name, fits in self.fits.items() if fits)
        dense = [matrices[name] for name, fits in self.fits.items() if not fits]
        self.dense_modules = sorted({matrix.module for matrix in dense})
        self.report.left_dense = sorted({matrix.module for matrix in dense if not matrix.router})

    @torch.no_grad()
    def run(self) -> Iterator[tuple[str, Quantized]]:
        """Yields (module's name in the folder, its quantized linear), layer by layer."""
        layers = list(self.model.get_submodule(self.path).children())
        self._load(self.model, "", skip=f"{self.path}.")
        self._load(layers[0], f"{self.path}.0.")
        calls, form = self._calls(layers)
        streams = {"calibration": calls["calibration"], "reference": calls["calibration"]}
        if self.held_out:
            self._round(self.model)  # what the folder stores of the parameters before the layers
            streams |= {"dense": calls["held_out"], "quantized": self._calls(layers)[0]["held_out"]}
            if self.method == "gptq":
                streams |= {"nearest": streams["quantized"]}
            self._load(self.model, "", skip=f"{self.path}.")
        at: dict[str, list[LayerCall]] = {name: [each[0] for each in batches] for name, batches in streams.items()}
        for i, layer in enumerate(layers):
            prefix = f"{self.path}.{i}."
            if i:
                self._load(layer, prefix)
            dense = copy.deepcopy(layer)
            nearest = self._nearest(copy.deepcopy(layer), prefix) if "nearest" in streams else None
            quantized = self._quantize_layer(layer, prefix, at["calibration"], dense, at["reference"])
            self._round(layer, prefix)
            for name, batches in streams.items():
                computed = dense if name in ("reference", "dense") else nearest if name == "nearest" else layer
                assert computed is not None
                following = [each[min(i + 1, len(layers) - 1)] for each in batches]
                at[name] = [replace(after, x=call.into(computed)) for call, after in zip(at[name], following)]
            layer.to("meta")
            yield from self.layered.stored(quantized)
        if self.held_out:
            before, self.report.held_out_tokens = self._loss(layers, at["dense"], form)
            self._round(self.model)
            after, _ = self._loss(layers, at["quantized"], form)
            self.report.loss_before, self.report.loss_after = before, after
            if "nearest" in streams:
                self.report.loss_nearest, _ = self._loss(layers, at["nearest"], form)

    def dense(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (tensor's name in the folder, fp16 values) of everything that is not quantized."""
        for tensor, read in self.layered.dense(self._not_quantized(), self.read):
            value = read.to(torch.float16)
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{tensor} holds values that are not finite in fp16")
            yield tensor, value

    def _not_quantized(self) -> list[str]:
        """The parameters that are not stored quantized."""
        quantized = [name for name, fits in self.fits.items() if fits]
        coded = {f"{name}.bias" for name in quantized}
        coded |= {self.layered.matrices[name].parameter for name in quantized}
        return [name for name in self.layered.parameters if name not in coded]

    def _round(self, module: nn.Module, prefix: str = "") -> None:
        """Rounds a module's parameters as the folder stores them, in fp16, except for those that it stores quantized
        and the layers of the model."""
        coded = {self.layered.matrices[name].parameter for name, fits in self.fits.items() if fits}
        for name, parameter in module.named_parameters():
            if (
                prefix + name not in coded
                and not parameter.is_meta
                and (prefix or not name.startswith(f"{self.path}."))
            ):
                parameter.data = parameter.to(torch.float16).to(parameter.dtype)  # what was read stays as it is

    def _load(self, module: nn.Module, prefix: str, skip: str | None = None) -> None:
        values: dict[int, nn.Parameter] = {}  # of parameters that have several names
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if skip is not None and name.startswith(skip):
                continue
            if id(parameter) not in values:
                value = self.read(prefix + name)
                if not bool(torch.isfinite(value).all()):
                    raise ValueError(f"{prefix}{name} holds values that are not finite")
                values[id(parameter)] = nn.Parameter(
                    value.to(self.device, self.dtype), requires_grad=parameter.requires_grad
                )
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, values[id(parameter)])

    def _calls(self, layers: Sequence[nn.Module]) -> tuple[dict[str, list[list[LayerCall]]], Form]:
        """Returns the calls of all layers, per text, batch and layer, and the form of the layers' results."""
        first = CallCatcher(layers[0])
        with in_place_of(self.model, self.path, [first, *layers[1:]]), contextlib.suppress(LayerCaught):
            self._pass(self.calibration[0])
        form = form_of(layers[0], first.call)
        batches = {"calibration": self.calibration, "held_out": self.held_out}
        return {
            name: [calls_of_layers(self.model, self.path, form, partial(self._pass, one)) for one in several]
            for name, several in batches.items()
        }, form

    def _pass(self, batch: Sequences) -> Tensor:
        apart = (batch.documents, batch.positions) if self.layered.separates_documents else (None, None)
        return self.model(batch.tokens, *apart)  # type: ignore[no-any-return]

    def _loss(self, layers: Sequence[nn.Module], calls: Sequence[LayerCall], form: Form) -> tuple[float, int]:
        total, count = 0.0, 0
        for batch, call in zip(self.held_out, calls):
            with in_place_of(self.model, self.path, [OutputReplay(layer, call.x, form) for layer in layers]):
                logits = self._pass(batch)
            batch_loss, tokens = cross_entropy_sum(logits, batch.targets)
            total, count = total + float(batch_loss), count + int(tokens)
        return total / max(count, 1), count

    def _quantize_layer(
        self,
        layer: nn.Module,
        prefix: str,
        calls: Sequence[LayerCall],
        dense: nn.Module,
        references: Sequence[LayerCall],
    ) -> dict[str, Quantized]:
        """Quantizes a layer's linears in the order they run; each gets its inputs from the ones already quantized.

        Linears with the same input share one Hessian and one order.
        """
        quantized: dict[str, Quantized] = {}
        for together in shared_inputs(layer, calls[0]):
            names = [name for name in together if self.fits.get(prefix + name)]
            if not names:
                continue
            linears = {prefix + name: layer.get_submodule(name) for name in names}
            weights = {name: self.layered.weight_of(linear) for name, linear in linears.items()}
            statistics = Hessian(weights[prefix + names[0]].shape[1], self.device)
            for call, reference in zip(calls, references):
                statistics.add(input_of(layer, names[0], call), input_of(dense, names[0], reference))
            heads = self._heads(layer, prefix, names[0], calls[0])
            for name, result in self._solve(weights, statistics, heads).items():
                linear, bias = linears[name], getattr(linears[name], "bias", None)
                self.layered.set_weight(linear, self._dense_form(result))
                quantized[name] = result if bias is None else replace(result, bias=bias.detach().to(torch.float16))
        quantized |= self._quantize_experts(layer, prefix, calls, dense, references)
        missing = [n for n, fits in self.fits.items() if fits and n.startswith(prefix) and not (
            n in quantized or f"{n}[0]" in quantized)]  # fmt: skip
        if missing:
            raise NotQuantizable(f"`{missing[0]}` is not called as a linear layer")
        return quantized

    def _heads(self, layer: nn.Module, prefix: str, name: str, call: LayerCall) -> Heads | None:
        """The heads from which a linear gets its inputs: those that the model knows, else those that its input joins
        where groups and heads divide one another."""
        heads, size = self.layered.heads(prefix + name), self.settings.group_size
        if heads is not None or self.layered.knows_heads or self.order != "head_local":
            return heads
        found = joined_heads(layer, name, call)
        return found if found is not None and size > 0 and found.head_dim % size == 0 else None

    def _nearest(self, layer: nn.Module, prefix: str) -> nn.Module:
        """A layer with its linears rounded to nearest, and the rest in fp16, as the baseline's folder stores it."""
        experts = self.layered.experts(layer, prefix)
        stacks = {} if experts is None else dict(zip(experts.names, experts.weights))
        for name in [name for name, fits in self.fits.items() if fits and name.startswith(prefix)]:
            for expert, weight in enumerate(stacks.get(name, ())):
                weight.copy_(self._rounded(weight, f"{name}[{expert}]"))
            if name not in stacks:
                linear = layer.get_submodule(name.removeprefix(prefix))
                self.layered.set_weight(linear, self._rounded(self.layered.weight_of(linear), name))
        self._round(layer, prefix)
        return layer

    def _quantize_experts(
        self,
        layer: nn.Module,
        prefix: str,
        calls: Sequence[LayerCall],
        dense: nn.Module,
        references: Sequence[LayerCall],
    ) -> dict[str, Quantized]:
        """Quantizes a layer's experts, each on the tokens that choose it. Expert 3's names end in `[3]`."""
        own, originals = (self.layered.experts(one, prefix) for one in (layer, dense))
        if own is None or originals is None or not self.fits[own.names[0]]:
            return {}
        inputs_by_call = [expert_inputs(layer, call) for call in calls]
        x, ids = (torch.cat(parts) for parts in zip(*inputs_by_call))
        dense_x = torch.cat([expert_inputs(dense, reference)[0] for reference in references])
        quantized: dict[str, Quantized] = {}

        def quantize(expert: int, matrices: Sequence[int], inputs: Tensor, dense_inputs: Tensor) -> None:
            statistics = Hessian(inputs.shape[1], self.device)
            statistics.add(inputs, dense_inputs)
            stacks = {f"{own.names[i]}[{expert}]": own.weights[i] for i in matrices}
            results = self._solve({name: stack[expert] for name, stack in stacks.items()}, statistics)
            for name, result in results.items():
                stacks[name][expert] = self._dense_form(result)
            quantized.update(results)
            self.report.unseen += [] if len(inputs) else stacks

        for e in range(len(own.weights[0])):
            chosen = (ids == e).any(-1)
            inputs, dense_inputs = x[chosen], dense_x[chosen]
            quantize(e, (0, 1), inputs, dense_inputs)
            quantize(e, (2,), _hidden(inputs, own, e), _hidden(dense_inputs, originals, e))
        return quantized

    def _solve(
        self, weights: Mapping[str, Tensor], statistics: Hessian, heads: Heads | None = None
    ) -> dict[str, Quantized]:
        """Quantizes several weights [outputs, inputs] that multiply the same input. ValueError names the weight."""
        with _naming(next(iter(weights))):
            plan = ordering(statistics.mean().diagonal(), self.settings, self.order, heads)
        quantized = dict[str, Quantized]()
        for name, weight in weights.items():
            with _naming(name):
                quantized[name] = self._quantize_weight(weight, name, statistics, plan)
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
        if self.method == "gptq" and 0 < statistics.rows < inputs:
            self.report.short_of_tokens[name] = statistics.rows
        seconds = time.monotonic() - began
        self.report.linears.append(LinearResult(name, (outputs, inputs), error, nearest_error, seconds))
        return quantized

    def _rounded(self, weight: Tensor, name: str) -> Tensor:
        """A weight [outputs, inputs] rounded to nearest, in the dtype of the activations."""
        with _naming(name):
            return self._dense_form(round_to_nearest(weight.float(), self.settings))

    def _dense_form(self, quantized: Quantized) -> Tensor:
        """The weight [outputs, inputs] that a quantized one stands for, in the dtype of the activations."""
        return quantized.dequantize().T.to(self.dtype).contiguous()


@contextlib.contextmanager
def _naming(weight: str) -> Iterator[None]:
    """Puts a weight's name before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{weight}: {error}") from error


def _hidden(x: Tensor, experts: ExpertMatrices, expert: int) -> Tensor:
    """The values between gate, up and down of an expert: x [tokens, embed] -> [tokens, mlp]."""
    gate, up, _ = experts.weights
    return F.silu(F.linear(x, gate[expert])) * F.linear(x, up[expert])
