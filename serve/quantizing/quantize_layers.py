"""Quantizing a model layer by layer, from its dense values and rows of its task to a GPTQ folder and a report.

One layer is in memory at a time. Calibration and held-out rows each pass through the dense and through the quantized
layers. Each layer is fitted to its inputs from the quantized layers before it, with the dense outputs as the target.
Of several lists of layers (an encoder and a decoder) the one that runs first is quantized first, and its results are
what the next one gets. The held-out rows give the loss before and after quantizing.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

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
from tpshard.serve.quantizing.layer_calls import (
    Form,
    LayerCall,
    StackResult,
    calls_of_layers,
    expert_inputs,
    first_call,
    first_to_run,
    form_of,
    input_of,
    joined_heads,
    replaying,
    shared_inputs,
)
from tpshard.serve.quantizing.quantize_report import LinearResult, Quantizing
from tpshard.serve.quantizing.task_rows import TaskRows

Method = Literal["gptq", "nearest"]


_STORED = ("quantized", "nearest")


class Pass(NamedTuple):
    """Some rows on their way through a model, with the results of the lists of layers behind them."""

    rows: TaskRows
    results: dict[str, StackResult]


class Quantizer:
    """Quantizes a model, one layer per iteration of `run`.

    Args:
        spec: the model; `read(name)` returns a parameter's dense values.
        calibration, held_out: rows of the model's task; without held_out no losses are computed.
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
        calibration: TaskRows,
        held_out: TaskRows | None,
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
        self.model = self.layered.model
        self.inside = tuple(f"{path}." for path in self.layered.stacks)
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
        streams = {"calibration": self.calibration, "reference": self.calibration}
        if self.held_out:
            streams |= dict.fromkeys(("dense", *self._stored_streams), self.held_out)
        passes = {name: [Pass(rows, {}) for rows in batches] for name, batches in streams.items()}
        stacks = list(self.layered.stacks)
        while stacks:
            self._load_outside()
            first = passes["calibration"][0]
            path = stacks[0] if len(stacks) == 1 else first_to_run(self.model, stacks, partial(self._run, first))
            if path is None:
                raise NotQuantizable(f"the forward pass does not call `{stacks[0]}`")
            stacks.remove(path)
            yield from self._quantize_stack(path, passes)
        if self.held_out:
            self._load_outside()
            before, self.report.held_out_tokens = self._loss(passes["dense"])
            self._round(self.model)
            after, nearest = (self._loss(passes[name])[0] if name in passes else None for name in _STORED)
            self.report.loss_before, self.report.loss_after, self.report.loss_nearest = before, after, nearest

    @property
    def _stored_streams(self) -> tuple[str, ...]:
        """The streams of held-out rows through values as folders store them."""
        return _STORED if self.method == "gptq" else _STORED[:1]

    def _quantize_stack(self, path: str, passes: Mapping[str, Sequence[Pass]]) -> Iterator[tuple[str, Quantized]]:
        """Quantizes a list of layers, whose results the passes then have."""
        layers = list(self.model.get_submodule(path).children())
        calls = self._calls(path, layers[0], passes)
        at = {name: [each[0] for each, _ in batches] for name, batches in calls.items()}
        for i, layer in enumerate(layers):
            prefix = f"{path}.{i}."
            if i:
                self._load(layer, prefix)
            dense = copy.deepcopy(layer)
            nearest = self._nearest(copy.deepcopy(layer), prefix) if "nearest" in passes else None
            quantized = self._quantize_layer(layer, prefix, at["calibration"], dense, at["reference"])
            self._round(layer, prefix)
            for name, batches in calls.items():
                computed = dense if name in ("reference", "dense") else nearest if name == "nearest" else layer
                assert computed is not None
                following = [each[min(i + 1, len(layers) - 1)] for each, _ in batches]
                at[name] = [replace(after, x=call.into(computed)) for call, after in zip(at[name], following)]
            layer.to("meta")
            yield from self.layered.stored(quantized)
        for name, batches in calls.items():
            for one, call, (_, form) in zip(passes[name], at[name], batches):
                one.results[path] = StackResult(call.x, form)

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
            if prefix + name not in coded and not parameter.is_meta and (prefix or not name.startswith(self.inside)):
                parameter.data = parameter.to(torch.float16).to(parameter.dtype)  # what was read stays as it is

    def _load_outside(self) -> None:
        """Reads the parameters outside the lists of layers."""
        self._load(self.model, "", skip=self.inside)

    def _load(self, module: nn.Module, prefix: str, skip: tuple[str, ...] = ()) -> None:
        values: dict[int, nn.Parameter] = {}  # of parameters that have several names
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if name.startswith(skip):
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

    def _calls(
        self, path: str, first: nn.Module, passes: Mapping[str, Sequence[Pass]]
    ) -> dict[str, list[tuple[list[LayerCall], Form]]]:
        """For each pass the calls of all layers of a list and the form of their results; `first` is its first layer,
        whose values are read."""
        calls = dict[str, list[tuple[list[LayerCall], Form]]]()
        for stored in (False, True) if self.held_out else (False,):
            self._load(first, f"{path}.0.")
            if stored:  # what the folder stores of the parameters before the layers
                self._round(self.model)
                self._round(first, f"{path}.0.")
            for name, batches in passes.items():
                if (name in _STORED) != stored:
                    continue
                alike = {"reference": "calibration", "nearest": "quantized"}.get(name)
                alone = all(not one.results for one in batches)  # nothing is quantized before
                calls[name] = calls[alike] if alike and alone else [self._calls_of(path, first, one) for one in batches]
        if self.held_out:
            self._load_outside()
            self._load(first, f"{path}.0.")
        return calls

    def _calls_of(self, path: str, first: nn.Module, one: Pass) -> tuple[list[LayerCall], Form]:
        call = first_call(self.model, path, partial(self._run, one))
        if call is None:
            raise NotQuantizable(f"the forward pass does not call `{path}`")
        form = form_of(first, call)
        return calls_of_layers(self.model, path, form, partial(self._run, one)), form

    def _run(self, one: Pass) -> Tensor:
        """The model's output for the rows of a pass; lists of layers whose results are known are not computed."""
        inputs = one.rows.inputs(self.dtype)
        with replaying(self.model, one.results):
            return self.model(*(inputs if self.layered.separates_documents else inputs[:1]))  # type: ignore[no-any-return]

    def _loss(self, passes: Sequence[Pass]) -> tuple[float, int]:
        total, count = map(sum, zip(*(one.rows.loss(self._run(one)) for one in passes)))
        return total / max(count, 1), int(count)

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
        divide = found is not None and size > 0 and 0 in (found.head_dim % size, size % found.head_dim)
        return found if divide else None

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
