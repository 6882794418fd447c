"""The passes of a recipe, in the paper's order: recompute, bucket, schedule."""

from __future__ import annotations

import json
from pathlib import Path

from tpshard.parallelism.passes import buckets
from tpshard.parallelism.passes.recompute import Keep, keep_all, keep_layer_inputs, keep_selected, recompute
from tpshard.parallelism.program import Program, Spec
from tpshard.programs.automatic import Chooser
from tpshard.programs.patterns import covers, unit_of
from tpshard.programs.setting import Setting
from tpshard.recipes.diagnostic import Exit, Mistakes
from tpshard.recipes.schema import BucketFile, BucketSize, RematEvery


def apply(setting: Setting, program: Program) -> Program:
    """The program as it will run: recomputed, bucketed, scheduled, as the recipe asks."""
    chooser = Chooser(setting)
    reshard = setting.recipe.fsdp.reshard_after_forward
    if reshard == "auto":
        reshard = not chooser.keeps_gathered(lambda again: recompute(program, keep_of(setting), again))
    program = recompute(program, keep_of(setting), reshard_after_forward=reshard)
    return chooser.finished(program, choose_buckets(setting, chooser, program))


def keep_of(setting: Setting) -> Keep:
    """What the recipe's `remat` keeps for the backward pass."""
    remat = setting.recipe.remat
    if remat == "none":
        return keep_all
    if remat == "full":
        return keep_layer_inputs()
    if remat == "selective":
        return keep_selected()
    if isinstance(remat, RematEvery):
        return keep_layer_inputs(remat.every)
    return keep_selected(tuple(remat))


def choose_buckets(setting: Setting, chooser: Chooser, program: Program) -> buckets.Groups:
    """The recipe's buckets, as lists of parameter names in order of use. Raises Mistakes for a file or pattern that
    means nothing."""
    given = setting.recipe.fsdp.bucket
    used = buckets.in_order_of_use(program)
    ports = [port for port in program.inputs if port.kind == "parameter"]
    names = used + [port.name for port in ports if port.name not in used]
    itemsize = setting.param_dtype.itemsize
    sizes = {port.name: Spec(port.shape, port.dtype).bytes // port.dtype.itemsize * itemsize for port in ports}
    if given == "none":
        return [[name] for name in names]
    if isinstance(given, BucketSize):
        return buckets.by_size(names, sizes, given.mb * 1e6)
    if isinstance(given, BucketFile):
        return _from_file(setting, given.file, names)
    if isinstance(given, tuple):
        return [g for patterns in given if (g := [n for n in names if any(covers(p, n) for p in patterns)])]
    by_unit = buckets.by_unit(names, lambda name: unit_of(name, setting.recipe.fsdp.wrap))
    if given == "greedy":
        return chooser.greedy(program)
    return chooser.best(program, by_unit) if given == "auto" else by_unit


def _from_file(setting: Setting, path: str, names: list[str]) -> buckets.Groups:
    where = setting.recipe.where("fsdp.bucket.file")
    try:
        read = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise Mistakes.one(
            f"buckets cannot be read from {path}", exit=Exit.RECIPE, where=where, why=str(error)
        ) from error
    rows = read.get("buckets") if isinstance(read, dict) else read
    if not isinstance(rows, list) or not all(isinstance(n, str) for row in rows for n in [*row]):
        raise Mistakes.one(f"{path} holds no list of lists of parameter names", exit=Exit.RECIPE, where=where)
    unknown = [n for row in rows for n in row if n not in names]
    if unknown:
        raise Mistakes.one(f"{path} names parameters that the model does not have: {', '.join(unknown[:5])}",
                           exit=Exit.RECIPE, where=where)  # fmt: skip
    return rows
