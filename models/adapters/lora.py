"""What a recipe or a PEFT folder says of low-rank adapters, and the layers that get one. No torch.

Source: Hu et al. 2021 (LoRA); Kalajdzievski 2023 (rank-stabilized scaling); Liu et al. 2024 (DoRA). Names and defaults
are those of PEFT.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpshard.diagnostics.diagnostic import suggestion
from tpshard.diagnostics.patterns import ends, picks
from tpshard.files.linear_regex import fits

ALL_LINEAR = "all-linear"
"""Stands for every linear layer but the head, as in PEFT."""
A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude"
"""The names of an adapter's parameters beside the `weight` of its layer: [rank, inputs], [outputs, rank], and with DoRA
[outputs]. Experts have one of each: [expert, rank, inputs]; so have a server's slots."""


STACKED, HOLDER = ("gate_up_proj", "down_proj"), "_adapter"
"""The parameters of classes of transformers in which a module has the matrices of all experts, [expert, outputs,
inputs], and what follows their names in that of the module for their adapter."""


class TrainedError(ValueError):
    """What a recipe says of what is trained and the model does not have; `key` is the recipe's, `fix` what can be
    done, and `also` are further ones."""

    also: tuple[TrainedError, ...] = ()

    def __init__(self, message: str, key: str, why: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.key, self.why, self.fix = key, why, fix


class LoraError(TrainedError):
    """Adapters that the model cannot have. key: the recipe's below `adapters.lora`."""

    def __init__(self, message: str, key: str, why: str = "", fix: str = "") -> None:
        super().__init__(message, f"adapters.lora.{key}", why, fix)


def raise_all(errors: Iterable[TrainedError]) -> None:
    """Raises the first of the errors, with the others in `also`, if there is one."""
    each = {(one.key, str(one)): one for error in errors for one in (error, *error.also)}
    if each:
        first, *more = each.values()
        first.also = tuple(more)
        raise first


@dataclass(frozen=True)
class Adaptable:
    """A linear layer, or a stack of experts' linear layers, that can have an adapter."""

    path: str
    outputs: int
    inputs: int
    experts: int = 0
    """The number of stacked layers; 0: it is a single one."""
    turned: bool = False
    """Whether its weight is [inputs, outputs]."""
    head: bool = False
    """Whether its outputs are the logits."""
    theirs: str = ""
    """The module's path in a Hugging Face folder, `{}` in it an expert's number; "": as here."""
    table: bool = False
    """Whether it is an embedding table, whose inputs are its rows."""
    shares: bool = False
    """Whether its weight is another layer's too."""
    router: bool = False
    """Whether it is a router, whose weight is read and which is not called."""
    parameter: str = ""
    """The parameter of transformers' class that its weight is, or is a part of; "": it has no other name there."""
    holder: bool = False
    """Whether there is no such module, but one for the adapter of a parameter."""
    part: tuple[int, int, int, int] | None = None
    """(groups, rows, start, stop): `parameter` also has the outputs of other layers. Viewed as [groups, rows], rows
    start:stop of each group are this one's."""

    @property
    def weight(self) -> str:
        """The name of its weight: of experts that are a parameter of a module, `holder` is only their adapter's."""
        return self.parameter if self.holder else f"{self.path}.weight"

    @property
    def fused(self) -> bool:
        """Whether the folder's module also has the outputs of other layers; that of experts has one expert's alone."""
        return self.part is not None and not self.experts

    @property
    def names(self) -> tuple[str, ...]:
        """The paths by which a recipe or a folder may name it."""
        return (self.path,) if self.theirs in ("", self.path) else (self.path, self.theirs)


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer."""

    layer: Adaptable
    rank: int
    scaling: float
    """The factor of what it adds."""
    dropout: float = 0.0
    dora: bool = False
    slots: int = 0
    """How many adapters a server holds for the layer at once; 0: there is one."""
    wrapper: str = ""
    """The module in a PEFT folder that adapts the layer's `parameter` as a whole; "": its layer's own."""
    shared: str = ""
    """The path of the layer whose `lora_A` is also this one's, since one adapter has the outputs of both; "": it has
    its own."""

    def name(self, leaf: str) -> str:
        """The parameter that is its `leaf`."""
        return f"{self.shared if leaf == A and self.shared else self.layer.path}.{leaf}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its own parameters by leaf."""
        one, count = self.layer, self.slots or self.layer.experts
        stack = (count,) if count else ()
        shapes = {} if self.shared else {A: (*stack, self.rank, one.inputs)}
        return shapes | {B: (*stack, one.outputs, self.rank)} | ({MAGNITUDE: (one.outputs,)} if self.dora else {})


@dataclass(frozen=True)
class Lora:
    """The settings of a model's adapters; all have PEFT's meaning."""

    rank: int = 8
    alpha: float = 8.0
    targets: str | tuple[str, ...] = ALL_LINEAR
    """Ends of the paths of layers, such as `wq` or `mlp.down`, by tpshard's or the folder's names, of experts also by
    the parameter of transformers' class, `gate_up_proj`; `all-linear`; or a PEFT folder's one regular expression."""
    dropout: float = 0.0
    dora: bool = False
    use_rslora: bool = False
    """Whether an adapter is scaled by alpha / sqrt(rank) in place of alpha / rank."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Ranks of the layers whose path ends with a regular expression."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    """Ends of the paths of modules that are trained in full, beside the adapters."""
    exclude: str | tuple[str, ...] = ()
    """Ends of the paths of layers that get no adapter, or a regular expression of whole paths."""
    layers: tuple[int, ...] | None = None
    """The numbers of the layers of the model that have adapters; None: all."""
    lists: tuple[str, ...] = ()
    """The names of the lists in which these are counted; (): any."""
    parameters: tuple[str, ...] = ()
    """Ends of the paths of parameters of transformers' class, whose layers have adapters too."""
    of_folder: bool = False
    """Whether a PEFT folder says all this, which uses its own names alone, and any rank."""

    def adapters(
        self, adaptable: Iterable[Adaptable], model: str, parameters: Iterable[str] = (), *, some: bool = False
    ) -> tuple[Adapter, ...]:
        """The adapters of a model's layers, in their order. LoraError for what names nothing or does not fit.
        parameters: the model's. some: whether these are not all of its layers, so that a name may be of others."""
        layers = list(adaptable)
        wrappers = self._wrappers(layers)
        chosen = [layer for layer in layers if layer.path in wrappers or self._targets(layer)]
        several = [*dict.fromkeys(_short(layer) for layer in layers if not layer.table)]
        errors: list[TrainedError] = []
        if isinstance(self.targets, tuple) and not some:
            for i, target in enumerate(self.targets):
                if not any(self.is_target(target, layer) for layer in layers):
                    if any(picks(target, name) for name in parameters):
                        inside = any(self._ends(f"{target}.*", name) for layer in layers for name in self._names(layer))
                        errors.append(LoraError(
                            f"`{target}` of {model} can have no adapter", f"targets.{i}",
                            f"it is no linear layer of its own; these are {', '.join(several)}",
                            f"did you mean `{target}.*`?" if inside else
                            "some of these, or modules_to_save, which trains it as a whole",
                        ))  # fmt: skip
                        continue
                    close = suggestion(
                        target, sorted({name.split(".")[-1] for layer in layers for name in layer.names})
                    )
                    errors.append(LoraError(
                        f"`{target}` is no linear layer of {model}", f"targets.{i}",
                        f"its linear layers are {', '.join(several)}",
                        f"did you mean `{close}`?" if close else f"{ALL_LINEAR}, or some of these",
                    ))  # fmt: skip
        for parameter in () if some else self.parameters:
            if not any(_ends(parameter, layer.parameter) for layer in layers):
                errors.append(
                    LoraError(f"`target_parameters`: `{parameter}` can have no adapter in {model}", "targets")
                )
        if not chosen and not some:
            raise_all(errors)
            named = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
            message, why = f"`{named}` names no linear layer of {model}", f"these are {', '.join(several)}"
            if not named:
                message = "`targets` names no layer"
            elif not isinstance(self.targets, str):
                message, why = f"`{named}` has no adapter", "`modules_to_save` trains it in full, or it is excluded"
            raise LoraError(message, "targets", why, f"{ALL_LINEAR}, or some of these")
        called = [self._of_patterns(layer, wrappers.get(layer.path, "")) for layer in chosen]
        of_some = () if some else (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern))
        for key, patterns in of_some:
            used = {_of_pattern(patterns, names, 0)[0] for names in called}
            for pattern in (one for one in patterns if one not in used):
                if not any(_pattern(pattern, name) for names in called for name in names):
                    errors.append(LoraError(
                        f"`{pattern}` matches no layer with an adapter", f"{key}.{pattern}",
                        f"these have one: {', '.join(dict.fromkeys(map(_short, chosen)))}",
                    ))  # fmt: skip
                elif not self.of_folder:
                    errors.append(LoraError(
                        f"`{pattern}` decides nothing", f"{key}.{pattern}",
                        "an earlier pattern picks the same layers", "put it before that, or leave it out",
                    ))  # fmt: skip
        made: list[Adapter] = []
        owners: dict[str, str] = {}
        for layer in chosen:
            wrapper = wrappers.get(layer.path, "")
            owner = owners.setdefault(wrapper or layer.path, layer.path)
            try:
                made.append(replace(self._adapter(layer, wrapper), shared=owner if owner != layer.path else ""))
            except LoraError as error:
                if all(one.key != error.key for one in errors):  # other layers are as small
                    errors.append(error)
        raise_all(errors)
        return tuple(made)

    def _names(self, layer: Adaptable) -> tuple[str, ...]:
        return layer.names[-1:] if self.of_folder else layer.names

    def _wrappers(self, layers: Sequence[Adaptable]) -> dict[str, str]:
        """For each layer whose parameter is adapted as a whole, the module of PEFT that does so. Those of one module
        wrap each other, the last parameter of the module outside. Where some experts are adapted so, all are."""
        adapted: dict[str, list[str]] = {}
        of_layer: dict[str, str] = {}
        experts = not self.of_folder and any(self._as_parameter(layer) for layer in layers)
        for layer in layers:
            whole = layer.fused and self._targets(layer) and (
                self.of_folder or isinstance(self.targets, str)
                or any(self._ends(one, layer.theirs) and not self._ends(one, layer.path) for one in self.targets)
            )  # fmt: skip
            if whole or self._as_parameter(layer) or (experts and layer.experts and self._targets(layer)):
                of_layer[layer.path] = layer.parameter
                inside = adapted.setdefault(layer.parameter.rpartition(".")[0], [])
                inside += [layer.parameter] if layer.parameter not in inside else []
        return {
            path: module + ".base_layer" * (len(adapted[module]) - 1 - adapted[module].index(parameter))
            for path, parameter in of_layer.items() if (module := parameter.rpartition(".")[0])
        }  # fmt: skip

    def _as_parameter(self, layer: Adaptable) -> bool:
        """Whether a PEFT folder's `target_parameters` name a layer, or a recipe names experts as these would."""
        if self.of_folder:
            return bool(layer.parameter) and any(_ends(end, layer.parameter) for end in self.parameters)
        return bool(layer.experts) and isinstance(self.targets, tuple) and any(
            _ends(target, layer.parameter) and not any(self._ends(target, name) for name in layer.names)
            for target in self.targets
        )  # fmt: skip

    def _of_patterns(self, layer: Adaptable, wrapper: str) -> tuple[str, ...]:
        """The names of a layer in `rank_pattern` and `alpha_pattern`: of what one adapter has, as a whole, one name."""
        if not wrapper:
            return layer.names
        whole = layer.theirs if layer.fused and not self._as_parameter(layer) else layer.parameter
        return (whole,) if self.of_folder or layer.part is not None else (*layer.names, whole)

    def _targets(self, layer: Adaptable) -> bool:
        if layer.holder:
            return False  # it is no module that a name of modules could mean
        names = self._names(layer)
        if isinstance(self.exclude, str):
            if any(self._fits("exclude", self.exclude, name) for name in names):
                return False
        elif any(_ends(end, name) for end in self.exclude for name in names):
            return False
        if any(_inside(end, f"{name}.weight") for end in self.modules_to_save for name in layer.names):
            return False  # it is trained in full
        if self.layers is not None:
            lists = "|".join(self.lists) or r"[^.]*"
            numbers = (re.match(rf"(?:|.*?\.)(?:{lists})\.(\d+)\.", name) for name in layer.names)
            if not any(number is not None and int(number[1]) in self.layers for number in numbers):
                return False
        if isinstance(self.targets, tuple):
            return any(self._ends(target, name) for target in self.targets for name in names)
        if self.targets == ALL_LINEAR:
            return not (layer.head or layer.experts or layer.table or layer.router)
        return any(self._fits("targets", self.targets, name) for name in names)

    def is_target(self, target: str, layer: Adaptable) -> bool:
        """Whether one of the targets, or the only one, is this layer, which has an adapter."""
        return (
            isinstance(self.targets, str) or any(self._ends(target, name) for name in self._names(layer))
            or (not self.of_folder and bool(layer.experts) and _ends(target, layer.parameter))
        )  # fmt: skip

    def _ends(self, target: str, path: str) -> bool:
        """Whether a layer's path ends with a target; those of a PEFT folder are no patterns."""
        return _ends(target, path) or (not self.of_folder and ends(target, path))

    @staticmethod
    def _fits(key: str, pattern: str, name: str) -> bool:
        try:
            return fits(pattern, name)
        except ValueError as error:
            raise LoraError(str(error), key, fix="names of layers, or a regular expression of whole paths") from None

    def _adapter(self, layer: Adaptable, wrapper: str) -> Adapter:
        names = self._of_patterns(layer, wrapper)
        rank_key, rank = _of_pattern(self.rank_pattern, names, self.rank)
        _, alpha = _of_pattern(self.alpha_pattern, names, self.alpha)
        if rank > min(layer.inputs, layer.outputs) and not self.of_folder:
            least, key = min(layer.inputs, layer.outputs), f"rank_pattern.{rank_key}" if rank_key else "rank"
            raise LoraError(
                f"rank {rank} is above the smaller side of `{layer.path}`, {layer.outputs} x {layer.inputs}", key,
                "an adapter of that rank has more parameters than the layer needs",
                f"at most {least}" + f"; there alone by rank_pattern: {{{_short(layer)}: {least}}}" * (not rank_key),
            )  # fmt: skip
        if layer.table and self.dora:
            raise LoraError(f"an embedding has no dora: `{layer.path}`", "dora", fix="leave it out, or the embedding")
        if (layer.experts or layer.router) and (self.dora or self.dropout):
            key, kind = "dora" if self.dora else "dropout", "experts" if layer.experts else "routers"
            message, why = f"adapters of {kind} have no {key}: `{layer.path}`", "they are added to weights, as by PEFT"
            raise LoraError(message, key, why, f"leave it out, or the {kind}")
        scaling = alpha / (math.sqrt(rank) if self.use_rslora else rank)
        return Adapter(layer, int(rank), scaling, self.dropout, self.dora, wrapper=wrapper)

    def saved(self, parameters: Iterable[str], theirs: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """The parameters of the modules in `modules_to_save`. theirs: other paths of a module, by its own. LoraError
        for one that names no module."""
        names = list(parameters)
        found: dict[str, None] = {}
        errors: list[TrainedError] = []
        for i, end in enumerate(self.modules_to_save):
            matching = [
                n for n in names
                if _inside(end, n) or any(_inside(end, f"{path}.w") for path in theirs.get(n.rpartition(".")[0], ()))
            ]  # fmt: skip
            if not matching:
                close = suggestion(
                    end, sorted({part for n in names for part in n.split(".")[:-1] if not part.isdigit()})
                )
                errors.append(LoraError(f"`{end}` is no module with parameters", f"modules_to_save.{i}",
                                        fix=f"did you mean `{close}`?" if close else ""))  # fmt: skip
            found |= dict.fromkeys(matching)
        raise_all(errors)
        return tuple(found)


def _ends(end: str, name: str) -> bool:
    """Whether a path is `end`, or ends with it; numbers of experts do not count."""
    return name == end or name.endswith(f".{end}")


def _inside(end: str, name: str) -> bool:
    """Whether a parameter is in a module whose path ends so, within a word too, as PEFT compares: `norm` is also each
    `input_layernorm`."""
    parts = name.split(".")[:-1]
    return any(".".join(parts[:n]).endswith(end) for n in range(1, len(parts) + 1))


def _pattern(pattern: str, name: str) -> bool:
    try:
        return fits(rf"(?:.*\.)?(?:{pattern})", name)
    except ValueError:
        return False


def _of_pattern(patterns: Mapping[str, float], names: Sequence[str], default: float) -> tuple[str, float]:
    key = next((p for p in patterns if any(_pattern(p, name) for name in names)), "")
    return key, patterns[key] if key else default


def _short(layer: Adaptable) -> str:
    """A layer's path without the list that it is in, such as `mlp.down`."""
    return re.sub(r"^.*\.\d+\.(?=\D)", "", layer.parameter if layer.holder else layer.path)
