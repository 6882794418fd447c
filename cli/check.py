"""`tpshard check`: trains a recipe in two ways and finds the first operation whose results differ."""

from __future__ import annotations

import sys
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tpshard.cli.shared.arguments import Json, Overrides, RecipeArgument, check_change, load
from tpshard.diagnostics.diagnostic import Exit, plural

if TYPE_CHECKING:
    from tpshard.programs.compare.equality import Compared, FirstDifference
    from tpshard.programs.setting.setting import Setting
    from tpshard.recipes.keys.schema import Recipe

Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against", metavar="KEY.PATH=VALUE", show_default=False,
        help="A change that makes the other recipe, such as mesh.tp=2. Repeat it for more changes.",
    ),
]  # fmt: skip
Serving = Annotated[
    bool, typer.Option("--serving", help="Compare the server with the training program instead, on a run's own rows.")
]
Rows = Annotated[
    int | None, typer.Option("--rows", min=1, help="Held-out rows that --serving compares.", show_default="4")
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.")]


def check(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    against: Against = None,
    steps: Steps = 1,
    serving: Serving = False,
    rows: Rows = None,
    as_json: Json = False,
) -> int:
    """Train the same batch on two meshes or policies, and compare every gradient.

    Both run in this process, in float64, also where the recipes say bf16 or fp16; fp8 products round their operands.
    If they differ by more than rounding explains, names the first operation that differs and the line of the recipe
    that sharded it, and exits with 1. Meant for small models: the memory of all ranks is in this process.
    With --serving, a run's checkpoint gives the log-probabilities of held-out tokens twice, by its training program and
    by the server, each on its own mesh in workers. A token that is off by more than rounding explains is exit 1.
    """
    if serving:
        from tpshard.cli.check_serving import ROWS, check_serving

        if against or steps != 1:
            raise typer.BadParameter("--serving compares with the server", param_hint="--against, --steps")
        return check_serving(recipe, overrides or [], ROWS if rows is None else rows, as_json)
    if rows is not None:
        raise typer.BadParameter("it is for --serving", param_hint="--rows")
    from tpshard.programs.compare import equality
    from tpshard.programs.setting.setting import Setting
    from tpshard.recipes.reading.load import with_changes

    if not against:
        raise typer.BadParameter("name the other recipe, such as --against mesh.tp=2", param_hint="--against")
    pair = [load(recipe, overrides), load(recipe, [*(overrides or ()), *against])]
    check_change("--against", against, *pair)
    wide = wide_dtypes(*pair)
    pair = [with_changes(each, wide) for each in pair]
    settings = [Setting.of(each) for each in pair]
    print(f"training {plural(steps, 'step')} on both, all ranks in this process", file=sys.stderr)
    compared = equality.compare(settings[0], settings[1], steps)
    first = None
    if not compared.equal:
        print("they differ: comparing every value of one batch", file=sys.stderr)
        whole = [Setting.of(with_changes(each, _at_once(setting))) for each, setting in zip(pair, settings)]
        first = equality.first_difference(whole[0], whole[1])
    if as_json:
        import json

        print(json.dumps(_data(compared, first), indent=1))
    else:
        print(_text(compared, first, pair, against))
    return Exit.DONE if compared.equal else Exit.BUG


_DTYPES = (
    "fsdp.master_dtype",
    "fsdp.param_dtype",
    "fsdp.reduce_dtype",
    "fsdp.accumulate.dtype",
    "optimizer.state_dtype",
)


def wide_dtypes(one: Recipe, other: Recipe) -> list[str]:
    """The overrides that set a dtype of both recipes to fp32 where both have bf16 or fp16.

    The check computes fp32 as float64. Rounding to bf16 or fp16 would hide what the recipes compute differently.
    """

    def dtype(recipe: Recipe, key: str) -> str:
        return str(reduce(getattr, key.split("."), recipe))

    halves = ("bf16", "fp16")
    return [f"{key}=fp32" for key in _DTYPES if dtype(one, key) == dtype(other, key) and dtype(one, key) in halves]


def _at_once(setting: Setting) -> list[str]:
    """The overrides with which a step has a single micro-batch."""
    if setting.stacking is not None:
        return []
    staged = setting.recipe.pipeline is not None and setting.recipe.pipeline.micro_batches is not None
    return [f"batch.per_device={setting.batch.sequences_each}", *["pipeline.micro_batches=null"] * staged]


def _data(compared: Compared, first: FirstDifference | None) -> dict[str, Any]:
    import dataclasses

    return {
        "equal": compared.equal,
        "losses": compared.losses,
        "largest": dataclasses.asdict(compared.largest),
        "distances": [dataclasses.asdict(d) for d in compared.distances],
        "first_difference": None if first is None else dataclasses.asdict(first),
    }


def _text(compared: Compared, first: FirstDifference | None, pair: list[Recipe], against: list[str]) -> str:
    from tpshard.programs.compare.float64 import BOUND

    names = [", ".join(f"{axis}: {size}" for axis, size in each.mesh.items()) or "one device" for each in pair]
    lines = [f"{pair[0].name} ({names[0]}) against {' '.join(against)} ({names[1]}), in float64"]
    for number, (one, other) in enumerate(compared.losses, 1):
        lines.append(f"  step {number}  loss {one:.12g} and {other:.12g}")
    largest, count = compared.largest, len(compared.distances)
    lines.append(f"  {count} values compared; largest difference: {largest.name}, {largest.apart:.1e} of its norm")
    if compared.equal:
        lines.append(f"They are the same: rounding explains differences of up to {BOUND:g}.")
        return "\n".join(lines)
    lines.append(f"They differ: rounding explains {BOUND:g} at most. This is a bug of tpshard; please report it.")
    if first is None:
        lines.append(
            "No operation of one batch differs. Check buckets, prefetching and recomputation (remat=none, "
            "fsdp.bucket=none), the sum over micro-batches, and the update."
        )
        return "\n".join(lines)
    where = f"{first.op} in {first.module or 'the model'}, {first.phase}"
    lines += [f"The first operation that differs computes `{first.name}` ({where}): {first.apart:.1e} of its norm:"]
    for title, sharding in zip(("here", "there"), first.shardings):
        lines += [f"  {title}: " + sharding.replace("\n", "\n  ")]
    return "\n".join(lines)
