"""A model of which a part is trained: another model with parameters frozen, and with low-rank adapters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpshard.diagnostics.patterns import nearest_pick, picks
from tpshard.models.adapters.based_model import BasedModel, of_base
from tpshard.models.adapters.lora import HOLDER, MAGNITUDE, A, Adapter, B, Lora, LoraError, TrainedError, raise_all
from tpshard.models.model_spec import ModelSource, ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from tpshard.models.dims import Naming
    from tpshard.models.initialization import InitPlan
    from tpshard.models.layer_stacks import LayerStack


class FrozenError(TrainedError):
    """A pattern that freezes nothing, or all."""


@dataclass(frozen=True)
class AdaptedModel(BasedModel):
    """A model whose parameters are frozen where a pattern picks them, or, with adapters, but for these."""

    base: ModelSpec
    lora: Lora | None = None
    freeze: tuple[str, ...] = ()
    """Patterns of parameters, and of modules above them."""
    numbers: tuple[int, ...] | None = None
    """The numbers of the layers in the whole model, of which `base` has these alone; None: all."""

    # ---- what is adapted and what is frozen ------------------------------------------------------------------------
    @cached_property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters by the path of their layer. LoraError for what names nothing or does not fit."""
        if self.lora is None:
            return {}
        kept = {self._whole(one.path): one for one in self.base.adaptable()}
        layers = [replace(one, path=whole, theirs=one.theirs and self._whole(one.path, one.theirs),
                          parameter=one.parameter and self._whole(one.path, one.parameter))
                  for whole, one in kept.items()]  # fmt: skip
        name, some = self.base.source.name or "the model", self.numbers is not None
        chosen = self.lora.adapters(layers, name, self.base.shapes, some=some)
        return {
            kept[one.layer.path].path: replace(one, layer=kept[one.layer.path],
                                               shared=one.shared and kept[one.shared].path)
            for one in chosen
        }  # fmt: skip

    @cached_property
    def added(self) -> Mapping[str, tuple[int, ...]]:  # type: ignore[override]
        """The shapes of the adapters' parameters, by name."""
        return {f"{path}.{leaf}": shape for path, one in self.adapters.items() for leaf, shape in one.shapes.items()}

    @cached_property
    def frozen(self) -> frozenset[str]:  # type: ignore[override]
        names = {name: [self._whole(name, one) for one in each] for name, each in self.base.called().items()}
        chosen = {pattern: {name for name, each in names.items() if any(picks(pattern, one) for one in each)}
                  for pattern in self.freeze}  # fmt: skip
        errors: list[TrainedError] = []
        for i, pattern in enumerate(self.freeze):
            if self.numbers is None and not chosen[pattern]:
                close = nearest_pick(pattern, [one for each in names.values() for one in each])
                some = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names)
                errors.append(FrozenError(
                    f"`{pattern}` matches no parameter of {self.base.source.name or 'the model'}", f"train.freeze.{i}",
                    fix=f"did you mean `{close}`?" if close else f"its parameters are {', '.join([*some][:6])}, ...",
                ))  # fmt: skip
        raise_all(errors)
        if self.lora is None:
            return frozenset().union(*chosen.values())
        return frozenset(names) - set(self.saved)

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """The parameters of the base that are trained beside the adapters."""
        if self.lora is None or not self.lora.modules_to_save:
            return ()
        theirs = {one.path: [one.theirs] for one in self.base.adaptable() if one.theirs}
        theirs |= {path: [other] for path, other in self.base.folder_names().items()}
        if (tied := self.base.tied) is not None:
            theirs.setdefault(tied[1].rpartition(".")[0], []).extend(("output", tied[0]))
        saved = self.lora.saved(self.base.shapes, theirs)
        if coded := next((name for name in saved if name in self.base.packed), None):
            raise LoraError(f"`{coded.rpartition('.')[0]}` is quantized, and cannot be trained", "modules_to_save",
                            "its codes have no gradient", "an adapter beside it, or the dense folder")  # fmt: skip
        return saved

    @property
    def saved_head(self) -> str | None:
        """The folder's path of a head whose weight is that of embeddings in `saved`; None where none is."""
        tied = self.base.tied if self.saved else None
        return tied[0] if tied is not None and tied[1] in self.saved else None

    @property
    def left_out(self) -> frozenset[str]:  # type: ignore[override]
        return self.frozen if self.lora is not None else frozenset()

    def check(self) -> None:
        """Raises LoraError or FrozenError for what the model does not have, with all others in its `also`."""
        errors = []
        for part in ("adapters", "saved", "frozen"):
            try:
                getattr(self, part)
            except TrainedError as error:
                errors.append(error)
        raise_all(errors)
        if self.lora is None and self.numbers is None and self.frozen >= self.base.shapes.keys():
            fix = "leave out what is to be trained"
            raise FrozenError(f"nothing is left to train: {', '.join(self.freeze)} is all", "train.freeze", fix=fix)

    def called(self) -> Mapping[str, Sequence[str]]:
        return {name: [self._whole(name, one) for one in each] for name, each in super().called().items()}

    def _whole(self, name: str, other: str = "") -> str:
        """A name with the number that its layer has in the whole model; or another of what has that name."""
        if self.numbers is None:
            return other or name
        stack = self.base.stacks[0].path if self.base.stacks else ""
        layer = re.match(rf"{re.escape(stack)}\.(\d+)(?=\.|$)", name)
        if layer is None:
            return other or name
        number = self.numbers[int(layer[1])]
        if other in ("", name):
            return f"{stack}.{number}{name[layer.end() :]}"
        return re.sub(r"(?<=\.)\d+(?=\.|$)", str(number), other, count=1)

    # ---- the model -------------------------------------------------------------------------------------------------
    def module(self, dtype: torch.dtype) -> nn.Module:
        from tpshard.models.adapters.lora_modules import adapt

        model = self.base.module(dtype)
        for name, parameter in model.named_parameters():
            if name in self.frozen:
                parameter.requires_grad_(False)
        for adapter in self.adapters.values():
            adapt(model, adapter)
        return model

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**self.base.shapes, **self.added}

    def dims(self, module: nn.Module) -> dict[str, Naming]:
        """The base's; a factor has the weight's dims and `rank`."""
        from tpshard.models.adapters.lora_modules import AdaptedLayer, lora_leaves
        from tpshard.models.dims import Naming

        named = self.base.dims(module)
        for path, layer in module.named_modules():
            if not isinstance(layer, AdaptedLayer):
                continue
            weight = named.get(path.removesuffix(HOLDER) if layer.lora.layer.holder else f"{path}.weight")
            if weight is None and layer.lora.layer.shares and self.base.tied is not None:
                weight = named.get(self.base.tied[1])
            for leaf, dims in lora_leaves(layer.lora).items():
                named.pop(f"{path}.{leaf}", None)
                if weight is not None:
                    *stack, out, into = weight.dims if not layer.lora.layer.turned else (*weight.dims[::-1],)
                    own = {"out": out, "in": into, "expert": stack[0] if stack else "", "rank": "rank", "slot": "slot"}
                    named[f"{path}.{leaf}"] = Naming(tuple(own[dim] for dim in dims), weight.by)
        return named

    def own_dtypes(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        """Adapters are fp32 beside a base of any dtype."""
        import torch

        return {**self.base.own_dtypes(dtype), **dict.fromkeys(self.added, torch.float32)}

    def initial_block(
        self, name: str, starts: Sequence[int], sizes: Sequence[int], seed: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        import torch
        from tpshard.models.initialization import initial_block

        if name not in self.added:
            return self.base.initial_block(name, starts, sizes, seed, dtype)
        if name.endswith(MAGNITUDE):
            return self._row_norms(name, starts, sizes, seed, dtype)
        return initial_block(self._plan, name, starts, sizes, seed, dtype or torch.float32)

    @cached_property
    def _plan(self) -> InitPlan:
        """A as PEFT draws it, kaiming uniform with a = sqrt(5): within 1 / sqrt(inputs). B is zero. Of an embedding A
        is zero, and B normal."""
        from tpshard.models.initialization import Initial

        def drawn(name: str, shape: tuple[int, ...]) -> Initial:
            if self.adapters[name.rpartition(".")[0]].layer.table:
                return Initial(shape, 0.0, 1.0 if name.endswith(B) else 0.0, "normal")
            return Initial(shape, 0.0, 0.0 if name.endswith(B) else (3 * shape[-1]) ** -0.5, "uniform")

        return {name: drawn(name, shape) for name, shape in self.added.items() if name.endswith((A, B))}

    def _row_norms(
        self, name: str, starts: Sequence[int], sizes: Sequence[int], seed: int, dtype: torch.dtype | None
    ) -> Tensor:
        """DoRA's magnitudes begin as the norms of the weight's rows."""
        path = name.rpartition(".")[0]
        layer = self.adapters[path].layer
        rows, whole = [starts[0], 0], [sizes[0], layer.inputs]
        if layer.turned:
            rows, whole = rows[::-1], whole[::-1]
        weight = self.base.initial_block(f"{path}.weight", rows, whole, seed)
        norms = weight.float().norm(dim=0 if layer.turned else 1)
        return norms if dtype is None else norms.to(dtype)

    def keep(self, layers: Sequence[int]) -> AdaptedModel | None:
        fewer = self.base.keep(layers)
        if fewer is None:
            return None
        numbers = layers if self.numbers is None else [self.numbers[layer] for layer in layers]
        return replace(self, base=fewer, numbers=tuple(numbers))

    @property
    def stacks(self) -> tuple[LayerStack, ...] | None:  # type: ignore[override]
        """The base's; layers of one kind have the same adapters and frozen parameters too."""
        from tpshard.models.layer_stacks import refined

        if (stacks := self.base.stacks) is None:
            return None
        marks: list[tuple[str, object]] = [(path, (one.rank, one.scaling)) for path, one in self.adapters.items()]
        marks += [(name, "frozen") for name in self.base.shapes if name in self.frozen]
        return tuple(refined(stack, marks, "adapters or what is frozen differ") for stack in stacks)

    def to_json(self) -> dict[str, Any]:
        """The base, and beside it the adapters with the folder of the base's weights, which a checkpoint leaves out."""
        if self.lora is None:
            return self.base.to_json()
        folder = self.base.source.folder
        place = None if folder is None else [self.base.source.key, str(folder.absolute())]
        return {**self.base.to_json(), "adapters": {"lora": asdict(self.lora), "base": place}}

    @staticmethod
    def of_json(values: Mapping[str, Any], base: ModelSpec) -> AdaptedModel:
        """The model that `to_json` wrote."""
        own = values["adapters"]
        lora: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in own["lora"].items()
        }
        if own["base"] is not None:
            key, folder = own["base"]
            base = base.read_from(ModelSource(key, folder, Path(folder)))
        return AdaptedModel(base, Lora(**lora))

    # ---- the base's ------------------------------------------------------------------------------------------------
    parameter_dims = of_base("parameter_dims")
    identity = of_base("identity")
    notes = of_base("notes")
    packed = of_base("packed")

    @property
    def plain(self) -> ModelSpec:
        return self.base.plain

    @property
    def count(self) -> int | None:  # type: ignore[override]
        return None if self.base.count is None else self.base.count + sum(map(math.prod, self.added.values()))
