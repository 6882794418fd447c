"""Checks of programs before they run: unrequested reshards, and unevenly divided dims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes
from tpshard.diagnostics.patterns import covers, nearest
from tpshard.models.module_state import WrittenBuffer
from tpshard.models.own_code import line_of
from tpshard.parallelism.graph import Value
from tpshard.parallelism.mesh import size_of
from tpshard.parallelism.passes.recompute import layer_of, selectable
from tpshard.parallelism.program import Collective, Program, info
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.rules.control_flow import CONTROL_FLOW, WHILE_ROUNDS, while_loop
from tpshard.parallelism.sharding import even, local_size
from tpshard.parallelism.words import size, unasked_reshards
from tpshard.programs.fit.fit import nothing_saved
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.keys.parallel_keys import RematEvery
from tpshard.recipes.keys.schema import Recipe

MOST = 5


@contextmanager
def traceable(setting: Setting) -> Iterator[None]:
    """Turns an error of tracing a user's model into a mistake (exit 3) that names the line of its code."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Mistakes) or setting.spec.outline is not None:
            raise
        line, key = line_of(error), setting.spec.source.key
        if isinstance(error, WrittenBuffer):
            raise written_buffer(setting.recipe, error) from error
        if line is None:
            raise
        raise Mistakes.one(
            f"`{type(setting.model).__name__}` cannot be traced into one static graph",
            exit=Exit.RECIPE,
            where=setting.recipe.where(f"model.{key}"),
            why=f"{line}: {(str(error).strip() or type(error).__name__).splitlines()[0]}",
            fix="write this line with tensors of fixed shapes, such as torch.where for an `if`"
            if key == "module"
            else "name a subclass that computes this otherwise as `model.module`",
        ) from error


def written_buffer(recipe: Recipe, error: WrittenBuffer) -> Mistakes:
    """The mistake that the forward pass of a recipe's module writes to a buffer."""
    return Mistakes.one(
        str(error), exit=Exit.RECIPE, where=recipe.where(f"model.{recipe.model.named_by}"),
        why="a step computes with buffers and does not keep what is written to them",
        fix="compute a new tensor instead; for a BatchNorm track_running_stats=False, or another normalization",
    )  # fmt: skip


def check_remat(setting: Setting, program: Program) -> None:
    """Raises Mistakes (exit 3) for a name in a list of `remat`, or a pattern of its modules, that selects nothing and
    would have no effect."""
    names = setting.recipe.remat
    if isinstance(names, RematEvery):
        calls = (node for node in program.graph.nodes if node.op == "call_function")
        modules = {info(node).module for node in calls if layer_of(node) is not None}
        for pattern in names.modules:
            if not any(covers(pattern, module) for module in modules):
                close = nearest(pattern, modules, modules=True)
                raise Mistakes.one(
                    f"`remat.modules` names `{pattern}`, which computes nothing in the model's layers",
                    where=setting.recipe.where("remat.modules"),
                    fix=f"did you mean `{close}`?" if close else "modules of a layer, such as layers.*.mlp",
                )
    if not isinstance(names, tuple):
        return
    choices = selectable(program)
    short = [name for name in choices if "." not in name]
    wrong = [nothing_saved(setting.recipe, name, short) for name in names if name not in choices]
    if wrong:
        raise Mistakes(wrong)


def check_reshards(setting: Setting, program: Program) -> list[str]:
    """Applies `sharding.on_reshard` to collectives that no annotation asks for: error, warn (the result) or allow.

    For `error` raises Mistakes (exit 4) that name the five largest, each with its reason.
    """
    how = setting.recipe.sharding.on_reshard
    if how == "allow" or not (sentence := unasked_reshards(program.collectives)):
        return []
    if how == "error":
        unasked = sorted((c for c in program.collectives if not c.requested), key=lambda comm: -comm.bytes)
        raise Mistakes([_unasked_collective(setting, comm) for comm in unasked[:MOST]])
    return [sentence]


def _unasked_collective(setting: Setting, comm: Collective) -> Diagnostic:
    value = comm.value[0]
    return Diagnostic(
        f"nothing in the recipe asks for the {comm.kind} of `{value}`, {size(comm.bytes)}",
        exit=Exit.FIT,
        where=setting.recipe.where("sharding.on_reshard"),
        why=comm.reason,
        fix=f"annotate `{value}`, or sharding.on_reshard: warn",
    )


def control_flow_notes(setting: Setting, program: Program) -> list[str]:
    """Notes on a program with control flow: that it is not compiled, and for how many runs a `while_loop` is priced."""
    nodes = [node for node in program.graph.nodes if node.target in CONTROL_FLOW]
    name = info(nodes[0]).origin if nodes else ""
    notes = []
    if nodes and setting.recipe.compile in ("auto", "inductor"):
        notes.append(
            f"`{name}` is control flow, which is interpreted: what stands around it in the micro-batch's program "
            "is compiled in pieces"
        )
    for node in nodes:
        if node.target is while_loop:
            notes.append(f"`{info(node).origin}` runs as often as its test holds: it is priced for {WHILE_ROUNDS} runs")
    return notes


def uneven_notes(annotations: dict[Value, Annotation]) -> list[str]:
    """Notes on dims that their axes do not divide (`on_uneven: pad`), with their share of padding."""
    notes = []
    for value, annotation in annotations.items():
        for dim, axes in enumerate(annotation.sharding.dims):
            if not even(value.shape[dim], axes) and value.role != "gradient":
                names, part = ", ".join(axis.name for axis in axes), local_size(value.shape[dim], axes)
                padding = 1 - value.shape[dim] / (part * size_of(axes))
                notes.append(
                    f"{names} does not divide dim {dim} of `{value.name}` ({value.shape[dim]}): "
                    f"every device has {part}, {padding:.0%} of all is padding"
                )
    return notes
