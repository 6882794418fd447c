"""Compares the figures of edits, suggestions and `--search` with full plans, for random variants of recipes.

    python benchmarks/plan_variants.py [--count 100] [--seed 0] [--model NAME ...] [--deep N] [--seconds S]
                                       [--record] [--json]
    python benchmarks/plan_variants.py --only 17 [--seed 0]

Draws recipes of 8B, 70B and 405B and of smaller models (mesh, micro-batches, recomputation, buckets, gathering,
sequence parallelism, pipeline, dtypes, devices), and four variants of each, in which some of these keys are drawn
again. Each variant is priced as an edit is, after the variants before it, and as a whole plan that nothing is reused
for: by `plan`, and from a program that is captured with all layers. Memory and the times of a step, of collectives and
of what is exposed must agree. A variant that `plan` refuses must be refused as an edit too, with the same words.

The models have 4 to 9 layers; `--deep` variants have all of theirs. `--only` repeats the recipe with a number. Exits
with 1 if a figure differs by more than 1%, is negative or not finite, or something crashed.
"""

from __future__ import annotations

import gc
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.parallelism.depth import Depth
from tpshard.plan import planner
from tpshard.plan.search.search import price_variant
from tpshard.plan.search.search_result import VariantPrice
from tpshard.plan.step.pricing import Pricing
from tpshard.programs.parts import step_programs
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.programs.step.few_layers import FEWEST
from tpshard.programs.step.variants import Variants
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads, with_changes

from record import Record, in_one_line, parser_of

MODELS = {"llama3-8b": 32, "llama3-70b": 80, "llama3-405b": 126, "tiny-moe": 4, "granite-20b": 52, "llama3-1b": 16}
"""Presets with their numbers of layers."""
EACH = 4
"""Variants of a recipe."""
MOST = 0.01
"""The largest difference allowed, as a share of the full plan's figure."""

Changes = list[str]
"""`key.path=value`, as on the command line."""


@dataclass
class DrawnRecipe:
    """A random recipe: its text, and changes by what they are about."""

    text: str
    changes: dict[str, Changes]

    @property
    def overrides(self) -> Changes:
        return [change for changes in self.changes.values() for change in changes]

    def recipe(self) -> Recipe:
        return loads(self.text, self.overrides)


@dataclass
class ComparedVariant:
    """How a variant's figures as an edit compare with those of its full plans."""

    number: int
    model: str
    changes: Changes
    kind: str
    """equal, differs, refused, or crash."""
    words: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    """By figure, as a share of the full plan's."""
    staged: bool = False
    layers: int = 0

    @property
    def largest(self) -> float:
        return max(self.differences.values(), default=0.0)


# ---- drawing recipes ---------------------------------------------------------------------------------------------
def drawn(chance: random.Random, model: str, layers: int | None = None) -> DrawnRecipe:
    """A random recipe of a model, by default with some of its layers."""
    layers = layers or chance.randint(4, 9)
    tiny = model.startswith("tiny")
    device = chance.choice(["a100-40g", "a100-80g", "h100-sxm-80g", "h200", "b200", *["cpu"] * tiny])
    nodes = chance.choice([1, 2] if tiny else [1, 2, 4, 8, 32])
    text = f"""
cluster: {{device: {device}, nodes: {nodes}, devices_per_node: 8}}
model: {{preset: {model}, layers: {layers}}}
batch: {{global_sequences: {chance.choice([1, 2, 4]) * nodes * 8}}}
"""
    recipe = DrawnRecipe(text, {})
    for about in SETTINGS:
        recipe.changes[about] = SETTINGS[about](chance, recipe)
    return recipe


def redrawn(chance: random.Random, recipe: DrawnRecipe) -> DrawnRecipe:
    """The recipe with one to three of its settings drawn again."""
    again = DrawnRecipe(recipe.text, dict(recipe.changes))
    for about in chance.sample(list(SETTINGS), chance.randint(1, 3)):
        again.changes[about] = SETTINGS[about](chance, again)
        if about == "mesh":
            again.changes["pipeline"] = _pipeline(chance, again)
    return again


def _mesh(chance: random.Random, recipe: DrawnRecipe) -> Changes:
    devices = 8 * int(recipe.text.split("nodes: ")[1].split(",")[0])
    tp = chance.choice([1, 1, 2, 4, 8])
    pp = chance.choice([1, 1, 1, 2, 4]) if devices // tp >= 4 else 1
    left = devices // tp // pp
    dp = chance.choice([n for n in (1, 1, 2, 4, left) if left % n == 0])
    sizes = {"pp": pp, "dp": dp, "fsdp": left // dp, "tp": tp}
    return [f"mesh.{axis}={size}" for axis, size in sizes.items()]


def _pipeline(chance: random.Random, recipe: DrawnRecipe) -> Changes:
    if "mesh.pp=1" in recipe.changes["mesh"]:
        return ["pipeline=null"]
    if chance.random() < 0.2:
        return [f"pipeline={{schedule: {chance.choice(['gpipe', 'circular'])}, form: vectorized}}"]
    schedule = chance.choice(["gpipe", "1f1b", "1f1b", "interleaved_1f1b", "zero_bubble", "circular"])
    return [f"pipeline={{schedule: {schedule}, form: staged}}"]


def _per_device(chance: random.Random, recipe: DrawnRecipe) -> Changes:
    return [f"batch.per_device={chance.choice(['null', 1, 1, 2])}"]


def _accumulate(chance: random.Random, recipe: DrawnRecipe) -> Changes:
    return [
        f"fsdp.accumulate.gather={chance.choice(['microbatch', 'microbatch', 'step'])}",
        f"fsdp.accumulate.reduce={chance.choice(['each', 'each', 'last'])}",
        f"fsdp.accumulate.dtype={chance.choice(['fp32', 'fp32', 'bf16'])}",
    ]


def _remat(chance: random.Random, recipe: DrawnRecipe) -> Changes:
    return [f"remat={chance.choice(['none', 'selective', 'full', 'full', '{every: 2}', '{every: 3}'])}"]


def _buckets(chance: random.Random, recipe: DrawnRecipe) -> Changes:
    policies = ["auto", "auto", "auto", "none", "wrap", "greedy", "{mb: 100}", "{mb: 2500.5}"]
    wraps = ['["layers.*", [tok_embed], [norm, output]]', '["layers.*.attention*", "layers.*.mlp*"]', "[[layers.*]]"]
    return [f"fsdp.bucket={chance.choice(policies)}", f"fsdp.wrap={chance.choice([wraps[0], *wraps])}"]


def _gathering(chance: random.Random, recipe: DrawnRecipe) -> Changes:
    return [
        f"fsdp.reshard_after_forward={chance.choice(['true', 'true', 'false', 'auto'])}",
        f"fsdp.prefetch={chance.choice([0, 1, 1, 2, 4])}",
        f"fsdp.memory_limit={chance.choice(['null', 'null', 'null', '30GiB'])}",
    ]


def _dtypes(chance: random.Random, recipe: DrawnRecipe) -> Changes:
    dtypes = ["fp32", "fp32", "bf16"]  # of the moments: that of the parameters
    return [f"{key}={chance.choice(dtypes)}" for key in ("fsdp.master_dtype", "fsdp.reduce_dtype")]


def _sequence(chance: random.Random, recipe: DrawnRecipe) -> Changes:
    residual, embedded = chance.choice([("null", "null"), ("seq_sp", "null"), ("seq_sp", "seq_sp")])
    both = f'{{"layers.*.residual": [batch, {residual}, embed], embedded: [batch, {embedded}, embed]}}'
    used = "seq_sp" in (residual, embedded)
    return [f"sharding.rules.seq_sp={'tp' if used else 'null'}", f"sharding.annotate={both}"]


def _length(chance: random.Random, recipe: DrawnRecipe) -> Changes:
    return [f"model.seq_len={256 if 'tiny' in recipe.text else chance.choice([8192, 8192, 4096, 1024])}"]


def _compile_program(chance: random.Random, recipe: DrawnRecipe) -> Changes:
    return [f"compile={chance.choice(['inductor', 'blocks', 'eager'])}"]


def _optimizer(chance: random.Random, recipe: DrawnRecipe) -> Changes:
    name = f"optimizer.name={chance.choice(['adamw', 'adamw', 'lion'])}"
    return [name, f"train.clip_grad_norm={chance.choice(['1.0', '1.0', 'null'])}"]


SETTINGS = {
    "mesh": _mesh, "pipeline": _pipeline, "per_device": _per_device, "accumulate": _accumulate, "remat": _remat,
    "buckets": _buckets, "gathering": _gathering, "dtypes": _dtypes, "sequence": _sequence, "length": _length,
    "compiled": _compile_program, "optimizer": _optimizer,
}  # fmt: skip
"""What is drawn, in this order: a pipeline depends on the mesh."""


# ---- comparing ---------------------------------------------------------------------------------------------------
def plan_whole(recipe: Recipe, *, as_plan: bool) -> Pricing:
    """The pricing of a recipe's full plan: by `plan`, or from a program that is captured with all layers."""
    if as_plan:
        return planner.planned(recipe, recipe.name).pricing
    with planner.without_gc():
        setting = Setting.of(recipe, devices_of(recipe))
        return planner.price_training(training.build(setting, make=step_programs.micro_program))


def figures(price: Pricing | VariantPrice) -> dict[str, float]:
    """The figures that an edit has of a plan."""
    return {"memory": price.needed_bytes, "step": price.step_s, "exposed": price.exposed_s, "comm": price.comm_s}


def compared(edited: dict[str, float], planned: dict[str, float], step_s: float) -> dict[str, float]:
    """The difference of each figure, as a share; of times that are a millionth of a step or less, 0."""
    shares = {}
    for name, value in planned.items():
        if not (math.isfinite(value) and math.isfinite(edited[name]) and value >= 0 and edited[name] >= 0):
            shares[name] = math.inf
        elif name != "memory" and max(value, edited[name]) <= 1e-6 * step_s:
            shares[name] = 0.0
        else:
            shares[name] = abs(edited[name] - value) / value if value else math.inf
    return shares


def _figures_or_words(price: Callable[[], Pricing | VariantPrice]) -> dict[str, float] | str:
    """The figures of a variant; the words of its mistakes if it is refused."""
    try:
        return figures(price())
    except Mistakes as mistakes:
        return "; ".join(one.message for one in mistakes.diagnostics)


def compare(
    number: int, model: str, base: Recipe, recipe: DrawnRecipe, changes: Changes, variants: Variants
) -> ComparedVariant:
    """The outcome of one variant."""
    gc.collect()  # the plans before it
    outcome = ComparedVariant(number, model, recipe.overrides, "equal", staged="pipeline=null" not in recipe.overrides)
    outcome.layers = base.model.layers or 0
    try:
        edited = _figures_or_words(lambda: price_variant(with_changes(base, changes), "train", variants))
        stretched = outcome.staged or Depth("layers", base.model.layers or 0).copies >= FEWEST
        plans = [
            _figures_or_words(lambda as_plan=as_plan: plan_whole(recipe.recipe(), as_plan=as_plan))
            for as_plan in ((True, False) if stretched else (True,))
        ]
    except Exception as error:
        outcome.kind, outcome.words = "crash", in_one_line(error)
        return outcome
    for plan in plans:
        if isinstance(edited, str) or isinstance(plan, str):
            outcome.kind, outcome.words = ("refused", str(plan)) if edited == plan else ("differs", f"{edited}, {plan}")
        else:
            shares = compared(edited, plan, plan["step"])
            for name, share in shares.items():
                outcome.differences[name] = max(share, outcome.differences.get(name, 0.0))
            if max(shares.values()) > MOST:
                outcome.kind, outcome.words = "differs", f"{edited} as an edit, {plan} as a plan"
        if outcome.kind != "equal":
            break
    return outcome


def outcomes(
    seed: int, number: int, models: list[str], layers: int | None = None, count: int = EACH
) -> Iterator[ComparedVariant]:
    """`count` variants of the recipe with a number, one after another, as suggestions are tried."""
    chance, variants = random.Random(f"{seed} {number}"), Variants()
    model = models[number % len(models)]
    while True:
        recipe = drawn(chance, model, layers)
        try:
            base = recipe.recipe()
        except Mistakes:
            continue
        break
    for _ in range(count):
        changed = redrawn(chance, recipe)
        changes = [change for about in changed.changes if changed.changes[about] != recipe.changes[about]
                   for change in changed.changes[about]]  # fmt: skip
        yield compare(number, model, base, changed, changes, variants)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=100, help="variants that are priced, beside refused ones")
    parser.add_argument("--deep", type=int, default=0, help="of these, variants of 8B, 70B and 405B with all layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first recipe")
    parser.add_argument("--only", type=int, help="the number of the only recipe")
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=math.inf, help="ends after this many seconds")
    parser.add_argument("--show", action="store_true", help="print every variant's changes")
    options = parser.parse_args()
    record, start = Record("plan_variants", quiet=options.json), time.monotonic()
    done: list[ComparedVariant] = []
    kinds: Counter[str] = Counter()
    numbers = iter([options.only] if options.only is not None else range(options.first, 10**9))
    for number in numbers:
        enough = kinds.total() - kinds["refused"] >= options.count
        if enough or time.monotonic() - start > options.seconds:
            break
        deep = len({o.number for o in done if o.layers == MODELS[o.model]}) < options.deep
        models = ["llama3-8b", "llama3-70b", "llama3-405b"] if deep else options.model
        layers, count = (MODELS[models[number % len(models)]], 1) if deep else (None, EACH)
        for outcome in outcomes(options.seed, number, models, layers, count):
            kinds[outcome.kind] += 1
            done.append(outcome)
            wrong = outcome.kind in ("differs", "crash")
            record.say(f"{number:>4} {outcome.model:<12} {outcome.layers:>4} layers  {outcome.kind:<8}"
                       f"{outcome.largest:.1e}  {time.monotonic() - start:6.0f} s  {outcome.words}")  # fmt: skip
            if wrong or options.show:
                record.say(f"     {' '.join(outcome.changes)}")
    record.rows += [json.loads(json.dumps(vars(o), default=str)) for o in done if o.kind != "equal" or o.largest > 0]
    for kind in ("equal", "differs", "refused", "crash"):
        record.figure(kind, kinds[kind], "variants")
    priced = [o for o in done if o.differences]
    record.figure("staged", sum(o.staged for o in priced), "variants")
    for model, layers in MODELS.items():
        record.figure(f"{model}.variants", sum(o.model == model for o in priced), "variants")
        record.figure(f"{model}.deep", sum(o.model == model and o.layers == layers for o in priced), "variants")
    for name in ("memory", "step", "exposed", "comm"):
        record.figure(f"largest.{name}", 100 * max((o.differences[name] for o in priced), default=0.0), "%")
    record.close(write=options.record, as_json=options.json)
    return int(kinds["differs"] + kinds["crash"] > 0)


if __name__ == "__main__":
    sys.exit(main())
