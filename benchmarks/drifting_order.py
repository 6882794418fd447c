"""What an act-order that follows the data could gain over the static one, at 2, 3 and 4 bits.

    python benchmarks/drifting_order.py [--run RUN] [--window 4096] [--windows 6] [--record] [--json]

Trains the quickstart longer, on documentation, and quantizes it with the act-order of calibration text. The statistics
of activations then drift: windows of held-out documentation, of Python code and of tables of numbers. For each window
the linears are quantized from dense weights, in four ways:

- `static`: order and Hessian of the calibration text, as a folder has them;
- `order`: the Hessian of the calibration text, in the order of the window's own activations: what re-ordering at run
  time could do at best, since it would know only tokens that came before;
- `other`: the same with the order of another window of the same text: what of the gain is chance or the kind of text;
- `oracle`: order and Hessian of the window itself, on whose tokens the loss is measured: an upper bound of whatever
  follows the data, which no server can reach.

Prints the mean gain of each over `static` in nats a token, with its standard error over windows, and that of `order`
over `other`: what following the data within one kind of text is worth.
"""

from __future__ import annotations

import ast
import random
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
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

SEQ = 256
Hessians = Mapping[str, Tensor]


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
        for name, module in linears_of(model).items()
    ]
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
    """Replaces the weights of the model by quantized ones: solved with the Hessians `by`, in the order of `order`."""
    for name, module in linears_of(model).items():
        plan = ordering(order[name].diagonal(), settings, "global")
        solved = solve(dense[name], by[name].float(), settings, plan)
        module.weight.copy_(solved.dequantize().T)  # type: ignore[operator, union-attr]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--run", help="a run of a preset on the sample; without it the quickstart is trained for 600 steps"
    )
    parser.add_argument("--window", type=int, default=4096, help="tokens")
    parser.add_argument("--windows", type=int, default=6, help="of each kind of text")
    parser.add_argument("--group-size", type=int, default=32)
    arguments = parser.parse_args()
    record = Record("drifting_order", quiet=arguments.json)
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run or f"{folder}/run"
        if arguments.run is None:
            tpshard("train", "quickstart", "train.steps=600", f"run.dir={run}", "logging.wandb=null")
        source = open_source(run)
        model = fill(source.spec.build(), lambda name, starts, sizes, _: source.block(name, starts, sizes), "cpu")
    tokenizer = Tokenizer.from_file(str(ensure_sample().tokenizer / "tokenizer.json"))
    each = arguments.window // SEQ
    calibration = rows_of(documents("*train*"), tokenizer, 128)
    texts = {"documentation": documents("*validation*"), "code": code(), "numbers": numbers()}
    windows = [
        (kind, rows) for kind, text in texts.items()
        for rows in rows_of(text, tokenizer, each * arguments.windows).split(each)
    ]  # fmt: skip
    dense = {name: module.weight.detach().clone() for name, module in linears_of(model).items()}  # type: ignore[operator, union-attr]
    static, own = hessians(model, calibration), [hessians(model, rows) for _, rows in windows]
    whole = [loss(model, rows) for _, rows in windows]
    heads = ("gained by order", "by another", "by the oracle", "order over another")
    record.say(f"{'bits':<5} {'text':<13} {'dense':>7}  {'static':>7}  " + "   ".join(f"{head:<16}" for head in heads))
    for bits in (2, 3, 4):
        settings = Settings(bits=bits, group_size=arguments.group_size)
        quantize(model, dense, static, static, settings)
        losses = {"static": [loss(model, rows) for _, rows in windows], "order": [], "other": [], "oracle": []}
        for i, (kind, rows) in enumerate(windows):
            other = own[i - 1 if i and windows[i - 1][0] == kind else i + 1]
            for name, by, order in (("order", static, own[i]), ("other", static, other), ("oracle", own[i], own[i])):
                quantize(model, dense, by, order, settings)
                losses[name].append(loss(model, rows))
        for kind in texts:
            at = [i for i, (own_kind, _) in enumerate(windows) if own_kind == kind]
            row: dict[str, object] = {"bits": bits, "text": kind, "dense": mean(whole[i] for i in at)}
            row |= {name: mean(values[i] for i in at) for name, values in losses.items()}
            gains = {}
            for name in ("order", "other", "oracle"):
                gain = [losses["static"][i] - losses[name][i] for i in at]
                gains[name] = (mean(gain), stdev(gain) / sqrt(len(gain)))
                row[f"gain_of_{name}"], row[f"error_of_{name}"] = gains[name]
                record.figure(f"{name}.{bits}.{kind}", gains[name][0], "nats gained over the static order")
            beyond = [losses["other"][i] - losses["order"][i] for i in at]
            record.figure(f"following.{bits}.{kind}", mean(beyond), "nats gained over the order of another window")
            gains["following"] = (mean(beyond), stdev(beyond) / sqrt(len(beyond)))
            record.rows.append(row)
            shown = "   ".join(f"{gain:+.4f} ± {error:.4f}" for gain, error in gains.values())
            record.say(f"{bits:<5} {kind:<13} {row['dense']:>7.4f}  {row['static']:>7.4f}  {shown}")
        for name, module in linears_of(model).items():
            module.weight.data.copy_(dense[name])  # type: ignore[operator, union-attr]
    record.close(write=arguments.record, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
