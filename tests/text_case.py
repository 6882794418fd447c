"""Tiny programs with their answers in text files: tests/texts/FOLDER/NAME.txt, one stage or pass each.

A file begins with `# ` and a sentence that says why, and `# KEY: VALUE` lines; then comes Python, and below `----` the
answer. A function `fn` whose annotations are `DTYPE[SHAPE] @ SHARDING` is partitioned on `# mesh: x=2`; with
`# passes: [...]`, a Python list as in programs/parts/passes.py, the answer is what the last one changed. Lines
`# recipe: KEY=VALUE` instead build the step of the module `Net` below, and with `# for: decode` a server's step of the
model that they name. `make texts` writes all answers anew.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tpshard import parallelism
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.annotate import boundary
from tpshard.parallelism.passes import recompute
from tpshard.parallelism.passes.run import run
from tpshard.parallelism.program import Program
from tpshard.parallelism.simulate import draws
from tpshard.parallelism.texts import difference
from tpshard.plan.questions import stage_texts
from tpshard.programs.parts import passes, step_programs
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads

FOLDER = Path(__file__).parent / "texts"
LINE = "----\n"
BASE = "name: case\ncluster: {device: cpu}\nmodel: {module: 'text_case:Net', seq_len: 8, dtype: fp32}\n"


@dataclass(frozen=True)
class Typed:
    """A tensor of a case's function: `f32[4, 6] @ (None, "x")`."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    sharding: Any = None

    def __getitem__(self, shape: Any) -> Typed:
        return Typed(self.dtype, shape if isinstance(shape, tuple) else (shape,))

    def __matmul__(self, sharding: Any) -> Typed:
        return Typed(self.dtype, self.shape, sharding)


class Layer(nn.Module):
    """x + relu(up(x))"""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.up(x))


class Net(nn.Module):
    """The model of cases with a recipe: two layers, with the ids themselves as their input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        x = tokens.to(torch.float32).unsqueeze(-1).expand(-1, -1, 4)
        for layer in self.layers:
            x = layer(x)
        return x


NAMES = {
    "torch": torch, "nn": nn, "F": functional, "partial": functools.partial, "boundary": boundary,
    "f32": Typed(torch.float32), "bf16": Typed(torch.bfloat16), "i64": Typed(torch.int64),
    **vars(recompute), **vars(passes),
    **{name: getattr(parallelism, name) for name in parallelism.__all__},
}  # fmt: skip


def cases() -> list[Path]:
    return sorted(FOLDER.rglob("*.txt"))


def parse(path: Path) -> tuple[dict[str, list[str]], str, str]:
    """The keys of a case, its Python, and its answer."""
    head, _, answer = path.read_text().partition(LINE)
    keys = defaultdict[str, list[str]](list)
    for key, value in re.findall(r"^# (mesh|passes|recipe|stage|of|for): (.*)$", head, re.MULTILINE):
        keys[key].append(value)
    return keys, head, answer


def answer_of(path: Path) -> str:
    """What the case's program is at its stage, or what its last pass changes."""
    keys, code, _ = parse(path)
    names = dict(NAMES)
    exec(compile(code, str(path), "exec", dont_inherit=True), names)
    of = "".join(keys["of"])
    if keys["for"]:
        return stage_texts.text(stage_texts.stage(loads(BASE, keys["recipe"]), keys["for"][0], keys["stage"][0], of))
    program = _of_recipe(tuple(keys["recipe"])) if keys["recipe"] else _of_function(keys["mesh"][0], names["fn"])
    if keys["stage"] == ["collectives"]:
        return f"{program.collectives}\n"
    if keys["stage"]:
        return stage_texts.part_text(keys["stage"][0], program, of)
    *before, last = eval(keys["passes"][0], names)
    program = run(before, program)
    changes = difference(str(program), str(run([last], program)))
    return "".join(f"{line}\n" for line in changes or ["nothing changes"])


@functools.cache
def _of_recipe(overrides: tuple[str, ...]) -> Program:
    return step_programs.micro_program(Setting.of(loads(BASE, overrides)))


def _of_function(sizes: str, fn: Any) -> Program:
    mesh = Mesh({axis: int(size) for axis, size in (pair.split("=") for pair in sizes.split(", "))})
    tensors = dict(fn.__annotations__)
    result = tensors.pop("return", None)
    args = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in tensors.values()]
    out = [result] if isinstance(result, tuple) else result
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return partition(fn, args, mesh, [one.sharding for one in tensors.values()], out, names=[*tensors])


def results_of(path: Path) -> tuple[list[Tensor], list[Tensor]] | None:
    """The results of a case's function, as devices compute them behind its passes and as torch does; None without one,
    or where it draws random numbers."""
    keys, code, _ = parse(path)
    names = dict(NAMES)
    exec(compile(code, str(path), "exec", dont_inherit=True), names)
    if (fn := names.get("fn")) is None:
        return None
    program = run(eval("".join(keys["passes"]) or "[]", names), _of_function(keys["mesh"][0], fn))
    if draws(program):
        return None
    generator = torch.Generator().manual_seed(0)
    typed = [one for name, one in fn.__annotations__.items() if name != "return"]
    args = [torch.rand(one.shape, generator=generator, dtype=torch.float64).mul(4).to(one.dtype) for one in typed]
    return program.simulate(*args), torch.utils._pytree.tree_leaves(fn(*args))


def main() -> None:
    """Writes answers anew: of the cases that the command names, or of all."""
    named = sys.argv[1:]
    for path in (path for path in cases() if not named or path.stem in named):
        head, _, before = path.read_text().partition(LINE)
        if (answer := answer_of(path)) != before:
            path.write_text(head + LINE + answer)
            print(f"wrote {path.relative_to(FOLDER.parent.parent)}")


if __name__ == "__main__":
    main()
