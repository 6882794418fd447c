"""The setting of a recipe's server: its model, mesh and limits, and the sizes of its steps."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import psutil
from torch import nn
from tpshard.diagnostics.diagnostic import Exit, Mistakes, join
from tpshard.kernels.linear import TILE
from tpshard.kernels.quantized.int4 import DENSE_ROWS, agrees
from tpshard.kernels.quantized.quantized_linear import multiplies
from tpshard.models.adapters.slotted_model import Slots, SlottedModel
from tpshard.models.folders.hf_folder import DTYPES
from tpshard.models.model_spec import ModelSpec
from tpshard.models.transformers.patch_attention import limit_length
from tpshard.parallelism.mesh import Mesh
from tpshard.programs.fit.wrong_model import wrong_model
from tpshard.programs.server.adapter_slots import slots_of
from tpshard.programs.server.padding import padded_mlp
from tpshard.programs.server.recurrent_steps import CHUNK, StateShape, forgotten, state_shapes
from tpshard.programs.server.served import Served
from tpshard.programs.setting import naming
from tpshard.recipes.keys.schema import Recipe

Kind = Literal["cpu", "gpu"]
LONGEST = {"cpu": 128, "gpu": 2048}
"""Rows of the largest step by default. More rows gain little on a CPU, and delay other requests."""
LEAST = {"cpu": 1, "gpu": TILE}
"""Rows of the smallest step."""
APART = {"cpu": 2, "gpu": 8}
"""The ratio of consecutive step sizes. On a GPU the first dozens of rows cost as much as one."""
HALFWAY = 2 * TILE
"""From this size on a CPU has a step halfway to the next one: its time is proportional to the rows there."""
CHOOSING = (1, 8)
"""The smaller numbers of rows for which there are programs that choose tokens."""
CHUNKS_APART = 4
"""The ratio of consecutive chunk sizes, from `recurrent_steps.CHUNK` on."""


class Size(NamedTuple):
    """The size of a step's program: its rows, and whether they are a chunk (see `programs.recurrent_steps`)."""

    rows: int
    chunk: bool = False


@dataclass(frozen=True)
class ServeSetting:
    """A recipe with everything needed to build its server's programs."""

    recipe: Recipe
    mesh: Mesh
    served: Served
    kind: Kind
    slots: Slots | None = None
    """The room for adapters; None: there are none."""
    padding: bool = True
    """Whether the MLP is padded to a width that the devices divide."""

    @staticmethod
    def of(recipe: Recipe, served: Served, kind: Kind, slots: Slots | None = None) -> ServeSetting:
        """The setting of a recipe. slots: the room for adapters; default: what the recipe says. Mistakes (exit 4) where
        `serve.mesh` does not fit the model's heads, exit 7 for adapters that cannot be served with it."""
        if recipe.task != "lm":
            raise Mistakes.one(
                f"a model with `task: {recipe.task}` cannot be served", exit=Exit.FIT, where=recipe.where("task"),
                why="a server predicts the next token",
                fix="serve a model that is trained with task: lm; `tpshard evaluate` says the loss of this one",
            )  # fmt: skip
        mesh = Mesh({axis: max(1, size) for axis, size in recipe.serve.mesh.items()})
        setting = ServeSetting(recipe, mesh, served, kind, slots or slots_of(recipe, served.spec))
        ways, spec = setting.ways("heads"), served.spec
        if not spec.divides("heads", ways):
            heads, kv_heads, _ = spec.sizes.heads or (0, 0, 0)
            fit = join(str(n) for n in range(1, heads + 1) if spec.divides("heads", n))
            raise Mistakes.one(
                f"tp {ways} does not fit {heads} heads and {kv_heads} KV heads", exit=Exit.FIT,
                where=recipe.where("serve.mesh"), fix=f"serve.mesh.tp: {fit}",
            )  # fmt: skip
        return setting

    def ways(self, dim: str) -> int:
        """The number of devices over which the recipe's rules shard a dim."""
        return math.prod(self.mesh.axes.get(axis, 1) for axis in self.recipe.sharding.rules.get(dim, ()))

    @cached_property
    def spec(self) -> ModelSpec:
        """The model as this server computes it: with an MLP that its devices divide, and slots for adapters."""
        outline, quantized, width = self.served.spec.outline, self.served.quantized, None
        if outline is not None and self.padding:
            width = padded_mlp(outline, self.ways("mlp"), 1 if quantized is None else quantized.shared)
        spec = self.served.spec.served(width)
        return spec if self.slots is None else SlottedModel(spec, slots=self.slots)

    @cached_property
    def model(self) -> nn.Module:
        """The module on `meta`, in its compute dtype. Mistakes (exit 3) for an invalid user's module."""
        try:
            model = self.spec.build(dtype=DTYPES[self.served.dtype])
            own = self.spec.own_dtypes(DTYPES[self.served.dtype])
        except ValueError as error:
            raise wrong_model(self.recipe, error) from error
        for name, dtype in own.items():
            model.get_parameter(name).data = model.get_parameter(name).data.to(dtype)
        limit_length(model, self.max_seq)
        return model

    @cached_property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """The dim names of the parameters that have some."""
        if self.spec.names_dims:  # the recipe's `model.dims` are of another model
            return {name: own.dims for name, own in self.spec.dims(self.model).items()}
        return {name: own.dims for name, own in naming.dim_names(self.recipe, self.model, self.spec).items()}

    @property
    def invariant(self) -> bool:
        """Whether a row's result must not depend on the other rows."""
        setting = self.recipe.serve.batch_invariant
        return self.kind == "cpu" if setting is None else setting

    def parts(self, rows: int) -> str:
        """How a step of so many rows holds quantized weights on a CPU: in `int4` or `dense` parts, or "" if whole.

        See `kernels.int4`. Dense ones are held beside the others where all need at most a quarter of the memory.
        """
        if not self._holds_dense_parts:
            return ""
        return "dense" if rows >= DENSE_ROWS else "int4"

    @cached_property
    def _holds_dense_parts(self) -> bool:
        quantized, dtype = self.served.quantized, DTYPES[self.served.dtype]
        if quantized is None or self.kind != "cpu" or not multiplies(quantized.settings.bits, dtype, self.kind):
            return False
        parameters = dict(self.model.named_parameters())
        dense_bytes = sum(4 * parameters[name].numel() for name in quantized.weights if parameters[name].dim() == 2)
        return 4 * dense_bytes <= psutil.virtual_memory().total and agrees()

    @property
    def most(self) -> int:
        """Rows of the largest step."""
        step_tokens = self.recipe.serve.step_tokens
        return _up(max(LONGEST[self.kind], self.recipe.serve.requests) if step_tokens is None else step_tokens)

    @property
    def rows(self) -> tuple[int, ...]:
        """The sizes of the server's programs in rows; a step is padded to the next one.

        With recurrent layers, a row is the next token of a sequence.
        """
        most = self.most if not self.states else min(self.most, _up(self.recipe.serve.requests))
        sharded = self.mesh.ranks > 1 and (self.recipe.sharding.annotate or self.ways("seq") > 1)
        least = max(LEAST[self.kind], self.spec.fewest_rows)
        sizes = [TILE if sharded else least]  # rows that may be sharded are divided by their devices
        while sizes[-1] < most:
            size, following = sizes[-1], min(sizes[-1] * APART[self.kind], most)
            if self.kind == "cpu" and not sharded and size >= HALFWAY and following == 2 * size:
                sizes.append(size + size // 2)
            sizes.append(following)
        return tuple(sizes)

    @cached_property
    def states(self) -> dict[str, StateShape]:
        """The states of the model's recurrent layers, by name."""
        return state_shapes(self.model) if self.spec.recurrent else {}

    @property
    def pool_size(self) -> int:
        """The number of states in a pool: one for each sequence of a step, and one for padding rows; 0 without
        recurrent layers."""
        return self.logit_rows(self.most) + 1 if self.states else 0

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """The numbers of tokens of one prompt that a step of a model with recurrent layers can compute, ascending.

        There are none if a module does not continue a sequence by several tokens at once (Mamba's first version).
        """
        if not self.states or forgotten(self.model, self.states):
            return ()
        sizes = [CHUNK]
        while sizes[-1] * CHUNKS_APART <= self.most:
            sizes.append(sizes[-1] * CHUNKS_APART)
        return tuple(sizes)

    def fitting(self, rows: int) -> Size:
        """The size of the program that runs this many rows, unless they are a chunk."""
        return Size(next(size for size in self.rows if size >= rows))

    @property
    def sizes(self) -> list[Size]:
        """The sizes of all programs of the server, chunks last."""
        return [*(Size(rows) for rows in self.rows), *(Size(tokens, True) for tokens in self.chunks)]

    def steps_of_prompt(self, tokens: int) -> Counter[Size]:
        """The steps that compute a prompt of so many tokens, and how often each runs."""
        steps: Counter[Size] = Counter()
        rest = tokens
        for size in reversed(self.chunks):
            steps[Size(size, True)], rest = divmod(rest, size)
        if self.states:
            steps[Size(self.rows[0])], rest = rest, 0
        else:
            steps[Size(self.most)], rest = divmod(rest, self.most)
        if rest:
            steps[self.fitting(rest)] += 1
        return +steps

    def steps_of(self, what: str, requests: int, tokens: int) -> dict[Size, int]:
        """The steps, and how often each runs, of a prompt of so many tokens (`prefill`), or else of the next token of
        so many requests (`decode`)."""
        return dict(self.steps_of_prompt(tokens)) if what == "prefill" else {self.fitting(min(requests, self.most)): 1}

    def logit_rows(self, rows: int) -> int:
        """The maximal number of rows of a step with logits: one token per request."""
        return min(rows, _up(self.recipe.serve.requests))

    def choosing_rows(self, rows: int) -> int:
        """The rows of the programs that choose so many tokens, where devices have parts of the vocabulary."""
        most = self.logit_rows(self.most)
        return next(size for size in (*CHOOSING, most) if size >= min(rows, most))

    @property
    def max_seq(self) -> int:
        """The longest sequence that is served: the longest that the model supports, with two exceptions.

        Attention within chunks is served within the first chunk. Where rotary frequencies depend on the length,
        `model.seq_len` decides; its default is `original_seq`.
        """
        longest = self.spec.sizes.max_seq
        written = self.recipe.model.seq_len
        if self.chunk is not None:
            longest = min(longest or self.chunk, self.chunk)
        elif self.original_seq is not None:
            asked = written if self.recipe.where("model.seq_len").line else self.original_seq
            longest = min(longest or asked, asked)
        return written if longest is None else longest

    @property
    def chunk(self) -> int | None:
        """The number of tokens within which some layers of the model attend; None without such layers."""
        return self.spec.sizes.chunk

    @property
    def original_seq(self) -> int | None:
        """The length of sequences above which the rotary embedding uses other frequencies; None if it never does."""
        return self.spec.sizes.original_seq


def _up(rows: int) -> int:
    return -(-rows // TILE) * TILE
