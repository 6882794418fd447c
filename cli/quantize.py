"""`tpshard quantize`: writes a checkpoint or a folder as a GPTQ folder."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tpshard.cli.convert import Out, Source, check_tokenizer, unwritten
from tpshard.cli.shared.arguments import Json, Overrides, Overwrite, refuse_unread
from tpshard.cli.shared.files import refuse_folder
from tpshard.diagnostics.diagnostic import Exit, Mistakes

if TYPE_CHECKING:
    from tpshard.cli.shared.source_model import SourceModel
    from tpshard.models.objectives.tasks import Task
    from tpshard.recipes.keys.schema import Recipe
    from tpshard.serve.quantizing.quantize_report import Quantizing
    from tpshard.serve.quantizing.task_rows import TaskRows


def quantize(
    source: Source,
    out: Out,
    overrides: Overrides = None,
    text: Annotated[
        str | None,
        typer.Option(help="Calibration text, as `data.source` names it. Default: the recipe's.", show_default=False),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence. Default: the model's.", show_default=False)
    ] = None,
    nearest: Annotated[bool, typer.Option("--nearest", help="Round to nearest, without GPTQ: the baseline.")] = False,
    static_groups: Annotated[
        bool, typer.Option("--static-groups", help="Group neighbouring inputs, whatever the order of solving.")
    ] = False,
    damp: Annotated[float, typer.Option(min=0.0, help="Damping: share of the Hessian's mean diagonal.")] = 0.01,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Quantize the model in SOURCE into a GPTQ folder OUT that transformers, vLLM and `tpshard serve` read.

    The settings are the recipe's `quantize` section, changed by quantize.bits=4 quantize.group_size=64 ... OUT appears
    only when everything is written.
    """
    from tpshard.cli.shared.sources import keep_apart

    refuse_folder(out, overwrite)
    read = ("quantize", "data", "evaluate.sequences", "run", "name")
    refuse_unread("quantize", overrides, read, "the model is the stored one; --seq-len says the length of the text")
    _refuse(source)
    model, recipe = _open(source, overrides or ())
    if Path(model.name).resolve() == out.resolve():
        raise Mistakes.one(f"{out} is the folder of the model itself", exit=Exit.USAGE, fix="choose another name")
    keep_apart(model, out)
    if model.tokenizer is not None:
        check_tokenizer(model.tokenizer)
    import torch
    from tpshard.kernels.quantized.gptq_solver import Settings
    from tpshard.models.folders.folder_tokenizer import mask_of
    from tpshard.models.objectives.tasks import task_of
    from tpshard.plan.report.order_rows import order_text
    from tpshard.serve.quantizing.quantize_layers import Quantizer
    from tpshard.serve.quantizing.write_quantized import write_quantized

    length = min(seq_len or _seq_len(source, model, recipe), model.spec.sizes.max_seq or _LONGEST)
    section, gpu = recipe.quantize, torch.cuda.is_available()
    task = task_of(recipe.task, length, mask=mask_of(model.tokenizer))
    if task.text:
        calibration, held_out = _text(model, recipe, task, text, length)
    else:
        calibration, held_out = _made(recipe, task, {"--text": text, "--seq-len": seq_len})
    with _errors_told(model, out):
        quantizer = Quantizer(
            model.spec,
            model.read,
            calibration,
            held_out,
            Settings(section.bits, section.group_size, section.sym, static_groups, damp),
            section.order,
            method="nearest" if nearest else "gptq",
            device="cuda" if gpu else "cpu",
            dtype=torch.bfloat16 if gpu and model.dtype != torch.float32 else torch.float32,
            step=_progress,
        )
        report = write_quantized(quantizer, out, tokenizer=model.tokenizer, base=model.base, overwrite=overwrite)
    for sentence in _warnings(report):
        print(f"warning: {sentence}", file=sys.stderr)
    orders = _orders(out, model, task)
    if as_json:
        print(json.dumps({**asdict(report), "act_orders": orders}))
    else:
        print(_table(report))
        if orders:
            print(f"act-order: {order_text(orders)}")
        print(out)


def _orders(folder: Path, model: SourceModel, task: Task) -> list[dict[str, Any]]:
    """What the layout `tp_aware` makes of the order of a folder's linears, found on the model's graph."""
    from tpshard.plan.report.order_rows import order_rows
    from tpshard.programs.server.serve_setting import ServeSetting
    from tpshard.programs.server.served import model_to_serve
    from tpshard.programs.server.serving import moved_orders
    from tpshard.programs.server.task_orders import orders_in_task
    from tpshard.recipes.reading.load import loads

    section = model.spec.to_json() if model.spec.reads_code else {"preset": "tiny"}
    named = {"name": "quantized", "cluster": {"device": "cpu"}, "model": section, "serve": {"checkpoint": str(folder)}}
    recipe = loads(json.dumps(named))
    try:
        if not task.text:
            return order_rows(orders_in_task(model.spec, folder, task))
        return order_rows(moved_orders(ServeSetting.of(recipe, model_to_serve(recipe, "cpu"), "cpu")))
    except (
        Mistakes,
        ValueError,
    ):  # the folder is written; of a model that cannot be captured so there is nothing to say
        return []


def _refuse(source: str) -> None:
    """Raises `Mistakes` for sources that cannot be quantized: pickles, and quantized folders."""
    path = Path(source)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"):
        raise Mistakes.one(
            f"{path} is a pickle, which could run code and is never loaded",
            exit=Exit.USAGE,
            fix="give the folder of a model in safetensors, or a recipe",
        )
    if (path / "config.json").is_file():
        from tpshard.files.folder_json import FolderError
        from tpshard.kernels.quantized.gptq_config import read_config
        from tpshard.models.folders.hf_config import read_raw

        fix = "quantize the dense model that it was made from"
        try:
            read_raw(path)
            already = read_config(path) is not None
        except FolderError as error:
            raise Mistakes.one(str(error), exit=Exit.CHECKPOINT, fix=error.fix) from error
        except (ValueError, OSError):
            already = False  # the reader of the model tells what is wrong
        if already:
            raise Mistakes.one(f"{path} is already quantized", exit=Exit.FIT, fix=fix)


def _open(source: str, overrides: Sequence[str]) -> tuple[SourceModel, Recipe]:
    """The model that SOURCE names, and the recipe with the quantization settings.

    For a folder that is the recipe of its run, or `tiny` without one, with the overrides applied.
    """
    from tpshard.cli.shared.arguments import load
    from tpshard.cli.shared.sources import holds_model, named_tokenizer, open_source, opened_location, run_recipe
    from tpshard.models.folders.hf_config import read_raw
    from tpshard.models.transformers.class_names import task_of_class
    from tpshard.recipes.reading.load import with_changes

    path = opened_location(source)
    if not holds_model(path):
        return open_source(source, overrides, modules=True), load(source, overrides, trained=True)
    model = open_source(source, modules=True)
    run = run_recipe(path)
    recipe = load(str(run) if run.is_file() else "tiny", overrides, trained=True)
    if not run.is_file() and isinstance(path, Path) and (path / "config.json").is_file():
        recipe = with_changes(recipe, [f"task={task_of_class(read_raw(path))}"])
    return named_tokenizer(model, recipe, overrides), recipe


_LONGEST = 2048
"""Tokens of a sequence, where neither the recipe nor the model says it."""


def _seq_len(source: str, model: SourceModel, recipe: Recipe) -> int:
    """Tokens of a calibration sequence: as many as the model was trained with."""
    from tpshard.cli.shared.sources import holds_model, opened_location, run_recipe

    place = opened_location(source)
    if not holds_model(place) or recipe.file == str(run_recipe(place)):
        return int(recipe.model.seq_len)
    return model.spec.sizes.train_seq or _LONGEST


def _made(recipe: Recipe, task: Task, options: Mapping[str, object]) -> tuple[TaskRows, TaskRows]:
    """Calibration and held-out rows of a task that makes its rows. `Mistakes` (exit 2) for options about text."""
    from tpshard.models.objectives.tasks import held_out
    from tpshard.serve.quantizing.task_rows import TaskRows
    from tpshard.train.data.generated_rows import drawn

    if given := [name for name, value in options.items() if value is not None]:
        message = f"{given[0]} is about text, but `task: {recipe.task}` makes its rows"
        raise Mistakes.one(message, exit=Exit.USAGE, fix="leave it out")
    numbers = range(recipe.quantize.calibration.sequences)
    kept = [held_out(number) for number in range(recipe.evaluate.sequences)]
    batches = (drawn(task, rows, recipe.seed) for rows in (numbers, kept))
    calibration, others = (TaskRows(batch.tensors, task) for batch in batches)
    return calibration, others


def _text(
    model: SourceModel, recipe: Recipe, task: Task, source: str | None, seq_len: int
) -> tuple[TaskRows, TaskRows]:
    """Calibration and held-out text, as ids of the model's tokenizer: of `source`, else of the recipe's sources in
    their shares."""
    import torch
    from tpshard.serve.quantizing.task_rows import TaskRows
    from tpshard.train.data.corpus import open_text
    from tpshard.train.data.open_data import Mixture, OpenedData, open_data
    from tpshard.train.data.row_columns import Columns
    from tpshard.train.data.step_batch import StepBatch
    from tpshard.train.data.stream import Loader, held_out_batch
    from tpshard.train.data.tokens import load_tokenizer

    if model.tokenizer is None:
        why = "text needs the model's own tokenizer"
        raise Mistakes.one(
            f"{model.name} has no tokenizer", exit=Exit.DATA, why=why, fix="add data.tokenizer=DIR after OUT"
        )
    data, rows = recipe.data, model.spec.sizes.vocab
    tokenizer = load_tokenizer(model.tokenizer, bos=data.bos, eos=data.eos, rows=rows)
    for note in tokenizer.notes:
        print(f"warning: {note}", file=sys.stderr)
    if source is None:
        try:
            opened = open_data(recipe, seq_len, lambda corpus: tokenizer)
        except Mistakes as mistakes:
            another = "`--text TEXT` calibrates on another text"
            told = [replace(d, fix=f"{d.fix}; {another}" if d.fix else another) for d in mistakes.diagnostics]
            raise Mistakes(told) from mistakes
    else:
        corpus = open_text(source, Columns(data.column), key="--text")
        opened = OpenedData(Mixture.of(corpus.train, tokenizer), ((corpus.held_out, tokenizer),), tokenizer)

    def join_batches(batches: Iterable[StepBatch]) -> TaskRows:
        joined = list(batches)
        return TaskRows({name: torch.cat([batch[name] for batch in joined]) for name in task.fields}, task)

    sequences = recipe.quantize.calibration.sequences
    at_once = min(sequences, 8)
    again = tuple(replace(share, epochs=None) for share in opened.mixture.shares)  # a text that ends is read again
    endless = replace(opened.mixture, shares=again, epochs=None)
    loader = Loader(endless, seq_len=seq_len, global_sequences=at_once, bad_rows=data.bad_rows)
    calibration = join_batches(loader.next() for _ in range(-(-sequences // at_once)))
    loader.close()
    held_out = join_batches(
        held_out_batch(text, reads, seq_len=seq_len, sequences=recipe.evaluate.sequences)
        for text, reads in opened.held_out
    )
    return calibration, held_out


OTHER_CLASS = "a class that the gallery in docs/transformers.md lists as quantized"
OTHERS = "other settings below `quantize`"
"""The fix for a reason that is not one of `_WRONG`."""
SMALLER = "use a model whose values fit fp16: the format has no other dtype"
_WRONG = (
    ("divide one another", Exit.FIT, "set quantize.order=global, or another quantize.group_size"),
    ("not finite in fp16", Exit.FIT, SMALLER),
    ("beyond the range of fp16", Exit.FIT, SMALLER),
    ("not finite", Exit.CHECKPOINT, "use an earlier checkpoint, from before the values became non-finite"),
)
"""Messages of known errors, as (part of the text, exit code, fix)."""


@contextlib.contextmanager
def _errors_told(model: SourceModel, out: Path) -> Iterator[None]:
    """Raises the errors of quantizing as `Mistakes`, each with its fix."""
    from tpshard.models.layered.layered_model import NotQuantizable

    try:
        yield
    except ValueError as error:
        known = ((code, fix) for words, code, fix in _WRONG if words in str(error))
        code, fix = (Exit.FIT, OTHER_CLASS) if isinstance(error, NotQuantizable) else next(known, (Exit.FIT, OTHERS))
        raise Mistakes.one(f"{model.name} cannot be quantized", exit=code, why=str(error), fix=fix) from error
    except OSError as error:
        raise unwritten(out, error) from error
    finally:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _progress(done: int, of: int, name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done + 1}/{of} {name}", end="", file=sys.stderr, flush=True)
    elif name.endswith(("mlp.down", "down[0]")) or done == 0:
        print(f"{done + 1}/{of} {name}", file=sys.stderr, flush=True)


def _warnings(report: Quantizing) -> list[str]:
    """Sentences on a result that looks better than it is."""
    sentences = []
    if report.short_of_tokens:
        name, tokens = min(report.short_of_tokens.items(), key=lambda item: item[1])
        inputs = {linear.name: linear.shape[1] for linear in report.linears}[name]
        sentences.append(
            f"{len(report.short_of_tokens)} of {len(report.linears)} linears have fewer calibration tokens than inputs "
            f"({name} {tokens} for {inputs}): GPTQ fits these tokens, on which the errors in the table are measured; "
            "raise quantize.calibration.sequences or --seq-len"
        )
    after, rounded = report.loss_after, report.loss_nearest
    if after is not None and rounded is not None and after > rounded:
        sentences.append("on held-out text the result is worse than rounding to nearest: see --nearest")
    return sentences


def _table(report: Quantizing) -> str:
    errors: dict[str, list[tuple[float, float]]] = {}
    for linear in report.linears:  # a row for all experts of a layer
        errors.setdefault(linear.name.partition("[")[0], []).append((linear.error, linear.nearest_error))
    worst = {name: [max(column) for column in zip(*rows)] for name, rows in errors.items()}
    names = {name: name if len(rows) == 1 else f"{name} (worst of {len(rows)})" for name, rows in errors.items()}
    width = max((len(name) for name in names.values()), default=5)
    rows = [f"{'layer':<{width}}  error    to nearest"]
    rows += [f"{names[name]:<{width}}  {error:.5f}  {nearest:.5f}" for name, (error, nearest) in worst.items()]
    rows += [f"{name} stays dense: its sizes are not multiples of 32" for name in report.left_dense]
    if report.unseen:
        rows.append(
            f"{len(report.unseen)} linears of experts were rounded to nearest, because no calibration token "
            f"chose them: {', '.join(report.unseen[:3])}{', ...' if len(report.unseen) > 3 else ''}"
        )
    if not report.held_out_tokens:
        rows.append("no held-out loss: the text is too short to hold a part of it out")
    elif report.loss_before is not None and report.loss_after is not None:
        more = report.loss_after - report.loss_before
        rows.append(
            f"held-out loss {report.loss_before:.4f} -> {report.loss_after:.4f} ({more:+.4f} nats, "
            f"{report.held_out_tokens} tokens)"
        )
        if report.loss_nearest is not None:
            rounded = report.loss_nearest - report.loss_before
            rows.append(f"rounded to nearest it would be {report.loss_nearest:.4f} ({rounded:+.4f} nats)")
    return "\n".join(rows)
