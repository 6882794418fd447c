"""What an act-order that follows the data could gain over a static one, at 2, 3 and 4 bits.

    python benchmarks/drifting_order.py [--run RUN] [--window 2048] [--windows 32] [--record] [--json]

Trains the quickstart longer, on documentation. The statistics of activations then drift over a corpus: windows of
held-out documentation, of Python code and of tables of numbers. For each window the linears are quantized from dense
weights, in five ways:

- `static`: order and Hessian of a calibration text, documentation, as a folder has them;
- `mixed`: the same of a calibration text with as much of each kind: a static order for what is served;
- `past`: the Hessian of `mixed`, in the order of the activations of the window before, of the same kind: what
  re-ordering at run time can do, since a server knows only tokens that came before;
- `order`: the same in the order of the window's own activations: a bound of what any re-ordering can do;
- `oracle`: order and Hessian of the window itself, on whose tokens the loss is measured: a bound of whatever follows
  the data, new codes included, which no server can reach.

Quantized losses depend on luck: any two orders round differently. So every window draws its own part of the calibration
texts, and the luck of all five ways is independent from window to window. Prints the mean gain of each over `mixed` in
nats a token, and the standard error of this mean over windows.
"""

from __future__ import annotations

import ast
import itertools
import random
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from tpshard.cli.shared.sources import open_source
from tpshard.kernels.quantized.gptq_solver import Settings, ordering, solve
from tpshard.models.initialization import fill
from tpshard.train.data.sample import ensure_sample

from record import Record, parser_of
from running import tpshard

SEQ, PART = 256, 8
"""Tokens of a sequence, and sequences of a part of a calibration text."""
BITS = (2, 3, 4)
WAYS = ("dense", "static", "mixed", "past", "order", "oracle")
Hessians = Mapping[str, Tensor]
"""By the first of the linears that read an input."""
SHARED = {"wk": "wq", "wv": "wq", "up": "gate"}


def first(linear: str) -> str:
    """The first linear that reads the input of this one."""
    module, _, name = linear.rpartition(".")
    return f"{module}.{SHARED.get(name, name)}"


def code() -> Iterator[str]:
    """The standard library's code without docstrings, file by file."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            yield ast.unparse(ast.parse(path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError):
            continue


def numbers() -> Iterator[str]:
    """Tables of numbers."""
    draw = random.Random(0)
    while True:
        yield "\n".join(" ".join(f"{draw.gauss(0, 10 ** draw.randint(0, 4)):.3f}" for _ in range(8)) for _ in range(64))


def documents(pattern: str) -> Iterator[str]:
    """The sample's documents, of its training or its held-out files."""
    import gzip
    import json

    for file in sorted(ensure_sample().directory.glob(pattern)):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines)


def rows_of(texts: Iterator[str], tokenizer: Tokenizer, rows: int) -> Tensor:
    """The first `rows` sequences [rows, SEQ + 1] of tokens of these texts."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text).ids
        if len(ids) >= rows * (SEQ + 1):
            return torch.tensor(ids[: rows * (SEQ + 1)]).view(rows, SEQ + 1)
    raise ValueError(f"the texts have {len(ids)} tokens, fewer than {rows} rows")


def linears_of(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module for name, module in model.named_modules()
        if name.startswith("layers.") and getattr(module, "weight", torch.empty(0)).dim() == 2
    }  # fmt: skip


@torch.no_grad()
def hessians(model: nn.Module, rows: Tensor) -> Hessians:
    """The sum of x x^T of each linear's inputs, with the dense weights."""
    sums: dict[str, Tensor] = {}

    def add(name: str, x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1]).double()
        sums[name] = sums.get(name, 0) + flat.T @ flat

    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: add(name, inputs[0]))  # type: ignore[misc]
        for name, module in linears_of(model).items() if first(name) == name
    ]  # fmt: skip
    for part in rows[:, :-1].split(8):
        model(part)
    for hook in hooks:
        hook.remove()
    return sums


@torch.no_grad()
def loss(model: nn.Module, rows: Tensor) -> float:
    losses = [
        torch.nn.functional.cross_entropy(model(part[:, :-1]).flatten(0, 1).float(), part[:, 1:].flatten())
        for part in rows.split(8)
    ]
    return float(torch.stack(losses).mean())


@torch.no_grad()
def quantize(model: nn.Module, dense: Mapping[str, Tensor], by: Hessians, order: Hessians, settings: Settings) -> None:
    """Replaces the weights of the model by quantized ones: solved with the Hessians `by`, in the order of `order`.

    Linears of one input are solved as one: GPTQ treats each output alone.
    """
    linears = linears_of(model)
    for name in by:
        together = [other for other in linears if first(other) == name]
        plan = ordering(order[name].diagonal(), settings, "global")
        solved = solve(torch.cat([dense[n] for n in together]), by[name].float(), settings, plan).dequantize().T
        for other, weight in zip(together, solved.split([len(dense[n]) for n in together])):
            linears[other].weight.copy_(weight)  # type: ignore[operator, union-attr]


class Calibration:
    """The Hessians of a calibration text in parts, of which each window draws some."""

    def __init__(self, model: nn.Module, rows: Tensor):
        self.parts = [hessians(model, part) for part in rows.split(PART)]

    def draw(self, parts: int, draw: random.Random) -> Hessians:
        return total(draw.sample(self.parts, parts))


def total(parts: Iterable[Hessians]) -> Hessians:
    sums: dict[str, Tensor] = {}
    for part in parts:
        sums = {name: sums.get(name, 0) + hessian for name, hessian in part.items()}
    return sums


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--run", help="a run of a preset on the sample; without it the quickstart is trained for 300 steps"
    )
    parser.add_argument("--window", type=int, default=2048, help="tokens")
    parser.add_argument("--windows", type=int, default=32, help="of each kind of text")
    parser.add_argument("--group-size", type=int, default=32)
    arguments = parser.parse_args()
    record = Record("drifting_order", quiet=arguments.json)
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run or f"{folder}/run"
        if arguments.run is None:
            tpshard("train", "quickstart", "train.steps=300", f"run.dir={run}", "logging.wandb=null")
        source = open_source(run)
        model = fill(source.spec.build(), lambda name, starts, sizes, _: source.block(name, starts, sizes), "cpu")
    tokenizer = Tokenizer.from_file(str(ensure_sample().tokenizer / "tokenizer.json"))
    each = arguments.window // SEQ
    served = (arguments.windows + 1) * each
    documentation = Calibration(model, rows_of(documents("*train*"), tokenizer, 24 * PART))
    others, windows = list[Calibration](), dict[str, tuple[Tensor, ...]]()
    windows["documentation"] = rows_of(documents("*validation*"), tokenizer, served).split(each)
    for kind, text in (("code", code()), ("numbers", numbers())):
        rows = rows_of(text, tokenizer, 8 * PART + served)
        others.append(Calibration(model, rows[: 8 * PART]))
        windows[kind] = rows[8 * PART :].split(each)
    dense = {name: module.weight.detach().clone() for name, module in linears_of(model).items()}  # type: ignore[operator, union-attr]
    losses = {bits: {kind: {way: list[float]() for way in WAYS} for kind in windows} for bits in BITS}
    for kind, texts in windows.items():
        own = hessians(model, texts[0])
        for i, rows in enumerate(texts[1:]):
            draw, past, own = random.Random(f"{kind} {i}"), own, hessians(model, rows)
            static = documentation.draw(12, draw)
            mixed = total(calibration.draw(4, draw) for calibration in (documentation, *others))
            pairs = {
                "static": (static, static), "mixed": (mixed, mixed), "past": (mixed, past), "order": (mixed, own),
                "oracle": (own, own),
            }  # fmt: skip
            whole = loss(model, rows)
            for bits, (way, (by, order)) in itertools.product(BITS, pairs.items()):
                quantize(model, dense, by, order, Settings(bits=bits, group_size=arguments.group_size))
                losses[bits][kind][way].append(loss(model, rows))
            for name, module in linears_of(model).items():
                module.weight.data.copy_(dense[name])  # type: ignore[operator, union-attr]
            for bits in BITS:
                losses[bits][kind]["dense"].append(whole)
    heads = ("static", "past", "order", "oracle")
    record.say(f"{'bits':<5} {'text':<13} {'dense':>7}  {'mixed':>7}  " + "   ".join(f"{head:<16}" for head in heads))
    for bits, by_kind in losses.items():
        by_kind["all"] = {way: [value for kind in windows for value in by_kind[kind][way]] for way in WAYS}
        for kind, ways in by_kind.items():
            row: dict[str, object] = {"bits": bits, "text": kind} | {way: mean(values) for way, values in ways.items()}
            shown = []
            for way in heads:
                gains = [base - value for base, value in zip(ways["mixed"], ways[way])]
                gain, error = mean(gains), stdev(gains) / sqrt(len(gains))
                row[f"gain_of_{way}"], row[f"error_of_{way}"] = gain, error
                record.figure(f"{way}.{bits}.{kind}", gain, "nats gained over the mixed static order")
                record.figure(f"error.{way}.{bits}.{kind}", error, "nats, standard error of this gain")
                shown.append(f"{gain:+.4f} ± {error:.4f}")
            record.rows.append(row)
            record.say(f"{bits:<5} {kind:<13} {row['dense']:>7.4f}  {row['mixed']:>7.4f}  " + "   ".join(shown))
    record.close(write=arguments.record, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
