"""A run's saved programs load with the same code, reasons and results."""

from __future__ import annotations

import base64
import itertools
import json
import sys
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from small_model import of_small_model
from tpshard.parallelism import Mesh, partition, program_file
from tpshard.parallelism.program import Program
from tpshard.parallelism.rules.table import OTHER, entry_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import saved_step, training
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.recipes.reading.load import loads

RECIPE = of_small_model("""
name: saved
cluster: {device: cpu}
mesh: {fsdp: 2, tp: 2}
batch: {global_sequences: 8, per_device: 2}
""")


STAGED = ("mesh={pp: 2, fsdp: 2}", "pipeline={schedule: zero_bubble}", "model.tie_embeddings=true")


@cache
def built(changes: tuple[str, ...]) -> TrainingPrograms:
    return training.build(Setting.of(loads(RECIPE, changes)))


def everything(program: Program) -> tuple[object, ...]:
    """Everything that a program contains, for comparison."""
    why = {name: program.explanation_of(name) for name in program.records}
    infos = [node.meta.get("tpshard") for node in program.graph.nodes]
    same = program.mesh, program.inputs, program.outputs, program.records, program.donated, program.warnings
    return program.fingerprint, program.to_json(), infos, why, *same


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("fsdp.accumulate.gather=step", "fsdp.accumulate.reduce=last"),
        STAGED,
    ],
)
def test_the_programs_of_a_run_are_read_as_they_were_written(changes: tuple[str, ...]) -> None:
    programs = built(changes)
    setting = programs.setting
    text = saved_step.pack(programs)
    assert text is not None
    read = saved_step.unpack(text, setting)
    assert read.fingerprints == programs.fingerprints and read.storage == programs.storage
    for one, other in ((programs.micro, read.micro), (programs.update, read.update)):
        assert everything(one) == everything(other)
    assert (read.gather is None) == (programs.gather is None) and (read.reduce is None) == (programs.reduce is None)
    if programs.pipeline is not None:
        assert read.pipeline is not None and read.pipeline.table == programs.pipeline.table
        assert read.pipeline.layers == programs.pipeline.layers
    assert saved_step.pack(read) == text


def test_a_program_that_was_read_computes_the_same_bits() -> None:
    mesh = Mesh({"x": 2, "y": 2})

    def step(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        values = torch.tensor([1.0, float("inf"), -2.0, 0.5])
        positions = torch.arange(8)
        return [
            torch.softmax(x @ w, -1)[:, ::2].to(torch.bfloat16),
            torch.minimum(w[:4, :4], values),
            positions[x.argmax(1)],
        ]

    args = torch.randn(4, 8), torch.randn(8, 8)
    program = partition(step, args, mesh, in_shardings=[("x", None), (None, "y")])
    read = program_file.load(program_file.dump(program))
    assert everything(read) == everything(program)
    for one, other in zip(program.simulate(*args), read.simulate(*args), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


NEG = ("op", "aten.neg.default")


def one_node(
    op: str = "call_function", target: Any = NEG, name: str = "result", args: Any = None, keywords: Any = None
) -> dict[str, Any]:
    """A stored program of one node that reads the input `x`."""
    args = ["tuple", ["node", "x"]] if args is None else args
    port = [
        "Port",
        "x",
        ["tuple", 2],
        ["torch", "float32"],
        ["Layout", ["tuple", ["tuple"]]],
        "tensor",
        ["tuple"],
        None,
    ]
    nodes = [
        ["x", "placeholder", "x", ["tuple"], None, None],
        [name, op, list(target) if isinstance(target, tuple) else target, args, None, keywords],
        ["output", "output", "output", ["tuple", ["tuple", ["node", name]]], None, None],
    ]
    rest = [["mesh", []], ["tuple", port], ["tuple", port], ["map"], ["map"], ["list"], ["map"], None]
    return {"pool": [], "value": ["program", nodes, *rest]}


def callables() -> set[tuple[str, str]]:
    """The module and name of everything that can be called in any module that is loaded."""
    names = set()
    for module, loaded in [*sys.modules.items()]:
        for name, value in [*getattr(loaded, "__dict__", {}).items()]:
            if callable(value):
                names.add((module, name))
    return names


def test_no_callable_of_this_process_can_be_put_into_a_program() -> None:
    assert len(program_file.load(one_node()).graph.nodes) == 3
    names = callables()
    assert len(names) > 20_000 and ("os", "system") in names and ("_operator", "attrgetter") in names
    targets = {("function", name) for _, name in names} | {("function", *pair) for pair in names}
    targets |= {("op", f"{module}.{name}{end}") for module, name in names for end in ("", ".default")}
    targets |= {("op", f"aten.{name}.default") for _, name in names}
    reader = program_file._Reader({}, [])
    known = {*program_file.FUNCTIONS.values()}
    for i, target in enumerate(targets):
        try:
            called = reader._target("call_function", list(target), {})
        except Exception:
            if i % 100 == 0:
                with pytest.raises(ValueError):
                    program_file.load(one_node(target=target))
            continue
        assert called in known or (isinstance(called, torch._ops.OpOverload) and entry_of(called) is not OTHER), target


@pytest.mark.parametrize(
    "data",
    [
        one_node("call_method", "numpy"),
        one_node("call_module", "x"),
        one_node("get_attr", "x"),
        one_node("get_attr", "__class__", args=["tuple"]),
        one_node(name="x = __import__('os').system('true') or x"),
        one_node(name="print"),
        one_node(name="lambda"),
        one_node(name="\N{FULLWIDTH LATIN SMALL LETTER P}rint"),
        one_node(args=["tuple", ["mesh", []]]),
        one_node(args=["tuple", ["Port", "x", 0, 0, 0]]),
        one_node(keywords=["map", ["x=print('code'), y", 1]]),
        one_node(target=("op", "aten.from_file.default")),
        one_node(target=("op", "aten.set_.source_Tensor")),
        one_node(target=("op", "profiler._record_function_enter.default")),
        one_node(args=["tuple", ["function", "getitem"]]),
        one_node(args=["tuple", ["op", "aten.neg.default"]]),
        one_node(args=["tuple", ["tree", "[]"]]),
        one_node(args=["tuple", ["_class__", {}, []]]),
        one_node(args=["tuple", ["torch", "load"]]),
        {"pool": [["pool", 0]], "value": ["pool", 0]},
        {"pool": [["tuple", *[["pool", i + 1]] * 9] for i in range(60)] + [1], "value": ["pool", 0]},
        {"pool": [], "value": ["tensor", "float32", [1 << 62, 1 << 62], []]},
        {"pool": [], "value": json.loads('["list",' * 900 + "1" + "]" * 900)},
        {},
    ],
)  # fmt: skip
def test_a_file_holds_no_code_and_is_bounded(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        program_file.load(data)


def test_every_saved_program_refuses_every_kind_of_code() -> None:
    """In each program of a run, with stages and without, no node can be added that calls anything else."""
    code = itertools.cycle([["function", "attrgetter"], ["function", "_operator", "call"], ["op", "aten.save.default"]])
    for changes in ((), STAGED):
        programs = built(changes)
        data = json.loads(zlib.decompress(base64.b64decode(saved_step.pack(programs) or "")))
        stored = [value for value in lists_in(data) if value[0] == "program"]
        assert len(stored) >= 3
        for program in stored:
            program[1].insert(-1, ["added", "call_function", next(code), ["tuple"], None, None])
            text = base64.b64encode(zlib.compress(json.dumps(data).encode(), 1)).decode()
            with pytest.raises(ValueError):
                saved_step.unpack(text, programs.setting)
            del program[1][-2]


def lists_in(value: Any) -> Iterator[list[Any]]:
    """All lists in JSON that are not empty."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list) and value:
        yield value
        for item in value:
            yield from lists_in(item)


def test_plain_values_are_read_as_they_were_written() -> None:
    values = [
        1 + 2j,
        float("nan"),
        torch.Size([2, 3]),
        slice(1, None, 2),
        torch.bfloat16,
        torch.strided,
        frozenset({"x"}),
    ]
    assert repr(program_file.load(program_file.dump(values))) == repr([(2, 3) if v == (2, 3) else v for v in values])
