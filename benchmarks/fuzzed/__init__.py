"""Random programs, a family of ops each: what the partitioner is tried on, by benchmarks/fuzz.py and by the tests."""

from __future__ import annotations

import contextlib
import random

from tpshard.parallelism import Mesh, mesh_split

from fuzzed import arithmetic, data_movement, indexed, layer_ops, random_numbers
from fuzzed.steps import STEPS
from fuzzed.writer import MESHES, Case, Writer, as_text, sharding


def chain(w: Writer, rng: random.Random) -> None:
    """Steps of any kind, one after another."""
    for _ in range(rng.randint(1, 2)):
        w.tensor(1, 2, 2, 3, 3, 4)
    _steps(w, rng, rng.randint(3, 8))


def linked(w: Writer, rng: random.Random) -> None:
    """Two or three ops of different families on a mesh of three axes: each reads the results of those before it, some
    of which have an annotation."""
    mesh = w.mesh = Mesh(rng.choice(THREE_AXES))
    names = [n for n in FAMILIES if n not in ("linked", "chain", *random_numbers.FAMILIES)]
    for name in rng.sample(names, rng.randint(2, 3)):
        FAMILIES[name](w, rng)
        w.reuses = True
        w.to_double()
        i = w.pick()
        if i is not None and rng.random() < 0.7:
            text = as_text(rng, sharding(rng, mesh, w.values[i].dim()))
            w.step(f"mesh_split {text}", lambda x, text=text: mesh_split(x, mesh, text), i)


THREE_AXES: list[dict[str, int]] = [{"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2, "z": 2}, {"x": 2, "y": 3, "z": 2}]

FAMILIES = {
    **data_movement.FAMILIES, **indexed.FAMILIES, **arithmetic.FAMILIES, **layer_ops.FAMILIES,
    **random_numbers.FAMILIES, "chain": chain, "linked": linked,
}  # fmt: skip


def case(family: str, seed: int) -> Case:
    """The random program of a family and a seed: an op of the family, and up to three steps of any kind after it."""
    rng = random.Random(f"{family} {seed}")
    for attempt in range(50):
        writer = Writer(rng, Mesh(rng.choice(MESHES)))
        writer.generator.manual_seed(seed + 1000 * attempt)
        # an op refuses some sizes: those are not drawn
        with contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AssertionError):
            FAMILIES[family](writer, rng)
        if not writer.steps:
            continue
        if family not in ("chain", "linked"):
            tail = rng.randint(0, 3)
            if tail:
                writer.to_double()
            _steps(writer, rng, tail)
        with contextlib.suppress(RuntimeError, NotImplementedError):  # no gradient: another program
            program = writer.case(family, seed)
            program.fn(*(a.clone() for a in program.args))
            return program
    raise AssertionError(f"the family {family} wrote no program for the seed {seed}")


def numbered(number: int) -> Case:
    """The programs of all families in turn."""
    names = list(FAMILIES)
    return case(names[number % len(names)], number // len(names))


def _steps(w: Writer, rng: random.Random, count: int) -> None:
    total = len(w.steps) + count
    for _ in range(12 * count):
        if len(w.steps) >= total:
            return
        i = w.pick()
        if i is not None:
            rng.choice(STEPS)(w, rng, i)


__all__ = ["FAMILIES", "Case", "case", "numbered"]
