"""`tpshard evaluate`: losses and perplexities of any stored model on any text."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from tpshard.cli.convert import Source
from tpshard.cli.shared.arguments import Device, Json, Overrides, carried_files, on_device, refuse_unread
from tpshard.cli.train import OVERRIDES
from tpshard.diagnostics.diagnostic import Exit, Mistakes

if TYPE_CHECKING:
    from tpshard.parallelism.runtime.context import Context
    from tpshard.parallelism.runtime.place import WorkerPlace
    from tpshard.programs.setting.setting import Setting
    from tpshard.recipes.keys.schema import Recipe
    from tpshard.train.checkpoints.store_path import Location
    from tpshard.train.run.evaluation import HeldOutLoss
    from tpshard.train.run.training_engine import ReadBlock

Texts = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="TEXT", help="A text, named as in data.source: all of it; repeatable."),
]  # fmt: skip
Tasks = Annotated[
    str | None, typer.Option("--tasks", metavar="NAME,...", help="Tasks of lm-eval, which must be installed.")
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Examples of each task; default: all.")]
READ = (
    "mesh", "cluster", "sharding", "fsdp", "pipeline", "compile", "batch.per_device", "data", "evaluate.sequences",
    "model.seq_len", "model.dtype", "timeout_s", "logging.wandb", "serve", "run", "name",
)  # fmt: skip


def evaluate(
    source: Source,
    overrides: Overrides = None,
    data: Texts = None,
    tasks: Tasks = None,
    limit: Limit = None,
    as_json: Json = False,
    device: Device = None,
) -> int:
    """Print the loss and perplexity of the model in SOURCE on held-out text, or on the texts that --data names.

    The model is that of a recipe's latest checkpoint, a checkpoint or a Hugging Face folder, quantized or not, on any
    mesh (mesh.tp=2); with serve.checkpoint=FOLDER that of FOLDER, by a recipe's task and data. The program is that of
    training's evaluation. A run keeps the result as a row of metrics.jsonl.
    With --tasks it prints the metrics of lm-eval's tasks instead, computed by the server's engine without a server.
    """
    from tpshard.parallelism.runtime import place as places

    changes = on_device(overrides, device) if OVERRIDES not in os.environ else json.loads(os.environ.pop(OVERRIDES))
    refuse_unread("evaluate", changes, READ, "the model and its training are stored")
    recipe = recipe_of(source, changes)
    place = places.find(os.environ)
    if place is not None:
        _work(source, recipe, place, data or (), as_json)
    from tpshard.cli.shared.worker_errors import workers_of
    from tpshard.devices import machine
    from tpshard.parallelism.runtime.launcher import Nodes, launch

    machine.require(recipe)
    stored_place(source, recipe)
    if tasks is not None:
        if data:
            raise typer.BadParameter("tasks bring their own data", param_hint="--tasks, --data")
        return _tasks(source, recipe, [name for name in tasks.split(",") if name], limit, as_json)
    nodes = Nodes.of(os.environ)
    options = [*(f"--data={text}" for text in data or ()), *["--json"] * as_json]
    command = [sys.executable, "-P", "-m", "tpshard.cli.main", "evaluate", source, *options]
    env = {OVERRIDES: json.dumps(changes)}
    return launch(command, world=workers_of(recipe, nodes), nodes=nodes, env=env)


def _tasks(source: str, recipe: Recipe, names: Sequence[str], limit: int | None, as_json: bool) -> int:
    """Prints the metrics of lm-eval's tasks, and appends them to the record of the model's run."""
    import time

    from tpshard.cli.shared.evaluation_tasks import require_lm_eval, results_of, run_of
    from tpshard.cli.shared.sources import holds_model, latest, open_source
    from tpshard.recipes.reading.load import with_changes

    require_lm_eval()
    changed = {key: recipe.where(key).file.startswith("<override") for key in ("mesh.tp", "serve.mesh.tp")}
    if not recipe.where("serve.mesh").line or changed == {"mesh.tp": True, "serve.mesh.tp": False}:
        recipe = with_changes(recipe, [f"serve.mesh.tp={recipe.mesh.get('tp', 1)}"])
    place = stored_place(source, recipe)
    model = open_source(str(place if holds_model(place) else latest(place, recipe).folder))
    results = results_of(recipe, model, names, limit)
    run, step = run_of(model)
    if run is not None:
        append_to_run(run, [{"step": step, "eval_tasks": results, "time": time.time()}])
    if as_json:
        print(json.dumps({"schema": 1, "source": source, "model": model.name, "step": step, "tasks": results}))
        return 0
    print(f"{model.name}")
    for task, metrics in results.items():
        print("\n".join(f"  {task:<24} {name:<28} {value:.4f}" for name, value in metrics.items()))
    return 0


def recipe_of(source: str, changes: Sequence[str]) -> Recipe:
    """The recipe by which a stored model is evaluated: its run's, or for a Hugging Face folder a short one."""
    from tpshard.cli.preflight.model_checks import model_errors
    from tpshard.cli.preflight.preflight import on_this_host
    from tpshard.cli.shared.sources import ADAPTERS, MANIFEST, holds_model, open_source, opened_location, run_recipe
    from tpshard.recipes.reading.load import load, loads, with_changes

    path = opened_location(source)
    if not holds_model(path):
        recipe = load(on_this_host(source), [*changes, *carried_files(source, changes)])
    elif not isinstance(path, Path) or (path / MANIFEST).is_file():
        if not run_recipe(path).is_file():
            raise Mistakes.one(
                f"{source} has no recipe", exit=Exit.CHECKPOINT, why=f"there is no {run_recipe(path)}",
                fix="copy the recipe.yaml of its run two folders up",
            )  # fmt: skip
        recipe = load(str(run_recipe(path)), [*changes, *carried_files(str(run_recipe(path)), changes)])
    elif (path / ADAPTERS).is_file() and (base := open_source(source).base) is not None:
        recipe = loads(_recipe_of_folder(base), changes, file=source)
    else:
        recipe = loads(_recipe_of_folder(path), changes, file=source)
    data_ranks = _data_ranks(recipe)
    if recipe.batch.global_sequences % data_ranks:  # only micro-batches matter here
        recipe = with_changes(recipe, [f"batch.global_sequences={data_ranks * (recipe.batch.per_device or 1)}"])
    if wrong := [d for d in model_errors(recipe) if d.severity == "error"]:
        raise Mistakes(wrong)
    return recipe


def _recipe_of_folder(folder: Path) -> str:
    """A recipe for the model in a Hugging Face folder: computed in fp32 where it is stored so, and on a CPU."""
    from tpshard.cli.shared.source_model import unreadable_source
    from tpshard.cli.shared.worker_errors import visible_gpus
    from tpshard.models.folders import hf_config
    from tpshard.models.transformers.class_names import task_of_class

    try:
        computed = hf_config.computes(folder)
        raw = hf_config.read_raw(folder)
        length = hf_config.folder_config(str(folder)).seq_len if computed else 2048
    except (ValueError, OSError) as error:
        raise unreadable_source(folder, error) from error
    stored = str(raw.get("dtype", raw.get("torch_dtype", "float32")))
    whole = {
        "name": folder.resolve().name, "data": {"tokenizer": str(folder)}, "task": task_of_class(raw),
        "model": {
            "hf" if computed else "transformers": str(folder), "seq_len": length,
            "dtype": "bf16" if visible_gpus() and "32" not in stored else "fp32",
        },
    }  # fmt: skip
    return json.dumps(whole)


def _data_ranks(recipe: Recipe) -> int:
    import math

    from tpshard.cli.shared.worker_errors import workers_of
    from tpshard.parallelism.runtime.launcher import Nodes

    mesh = recipe.mesh_on(workers_of(recipe, Nodes.of(os.environ)))
    return math.prod(mesh.get(axis, 1) for axis in recipe.sharding.rules.get("batch", ()))


def stored_place(source: str, recipe: Recipe) -> Location:
    """The place of the model: SOURCE itself, what the command line names in serve.checkpoint, or the run's
    checkpoints."""
    from tpshard.cli.shared.sources import holds_model, model_place, opened_location, runs_of
    from tpshard.train.checkpoints.checkpoint import steps

    place, where = opened_location(source), recipe.where("serve.checkpoint")
    if holds_model(place):
        return place
    if where.file.startswith("<override") and recipe.serve.checkpoint != "latest":
        if (named := model_place(recipe.serve.checkpoint, recipe, "serve.checkpoint")) is not None:
            return named
        raise Mistakes.one(
            f"{recipe.serve.checkpoint} holds no model", exit=Exit.CHECKPOINT, where=where,
            fix="name a folder of `tpshard quantize`, a checkpoint or a run",
        )  # fmt: skip
    checkpoints = runs_of(source, recipe)
    if not steps(checkpoints):
        raise Mistakes.one(
            f"there is no checkpoint in {checkpoints}", exit=Exit.CHECKPOINT, where=recipe.where("run.dir"),
            fix="`tpshard train` writes them; or name a checkpoint's folder",
        )  # fmt: skip
    return checkpoints


def _work(source: str, recipe: Recipe, place: WorkerPlace, texts: Sequence[str], as_json: bool) -> NoReturn:
    from tpshard.cli.shared import streams
    from tpshard.cli.shared.worker_errors import describe, device_of_worker
    from tpshard.parallelism.runtime.worker import run_worker

    def body() -> int:
        from tpshard.parallelism.runtime.context import connect
        from tpshard.programs.setting.setting import Setting

        setting, limits = Setting.of(recipe, place.world), recipe.timeout_s
        with connect(
            place, setting.mesh, device=device_of_worker(recipe, place), start_s=limits.start, step_s=limits.step
        ) as context:
            result = result_of(source, setting, context, texts)
        if place.rank == 0:
            print(json.dumps(result) if as_json else table(result), flush=True)
            streams.require_written()
        return Exit.DONE

    run_worker(body, place, describe)


def result_of(source: str, setting: Setting, context: Context, texts: Sequence[str]) -> dict[str, Any]:
    """The losses of SOURCE as JSON values; rank 0 appends them to the record of its run. Every rank calls it."""
    from tpshard.train.run.evaluation import evaluate as losses_of

    opened: dict[str, Any] = {}

    def open_model(expected: Mapping[str, Any]) -> ReadBlock:
        opened.update(open_stored(source, setting.recipe, context, expected))
        return opened.pop("read")  # type: ignore[no-any-return]

    losses = losses_of(setting, context, open_model, texts)
    tokens = sum(one.tokens for one in losses)
    result = {
        "schema": 1, "source": source, "model": str(opened["folder"]), "step": opened["step"],
        "loss": sum(one.loss * one.tokens for one in losses if one.tokens) / tokens if tokens else None,
        "tokens": tokens, "seq_len": setting.seq_len, "dtype": setting.recipe.model.dtype,
        "mesh": dict(setting.mesh.axes), "results": [_as_json(one) for one in losses],
    }  # fmt: skip
    if context.is_main and opened["run"] is not None:
        _record(opened["run"], setting.recipe, result)
    return result


def _as_json(one: HeldOutLoss) -> dict[str, Any]:
    if not one.tokens:
        return {**vars(one), "loss": None, "perplexity": None}
    return {**vars(one), "perplexity": one.perplexity}


def open_stored(source: str, recipe: Recipe, context: Context, expected: Mapping[str, Any]) -> dict[str, Any]:
    """The reader of the model's blocks, with its folder, its step and its run's folder. Every rank calls it."""
    from tpshard.cli.shared.sources import ADAPTERS, MANIFEST, latest, open_source
    from tpshard.train.checkpoints.restore import open_checkpoint
    from tpshard.train.checkpoints.verify import Together

    folder = stored_place(source, recipe)
    of_model = isinstance(folder, Path) and any((folder / name).is_file() for name in ("config.json", ADAPTERS))
    if of_model and not (folder / MANIFEST).is_file():
        model = open_source(str(folder), modules=True, trusted=recipe)
        for name, (shape, _) in expected.items():
            if model.spec.shapes.get(name) != tuple(shape):
                raise Mistakes.one(
                    f"{folder} is another model than the recipe's", exit=Exit.CHECKPOINT, where=recipe.where("model"),
                    why=f"`{name}` is {_shape(model.spec.shapes.get(name))} there, and {_shape(shape)} in the recipe",
                    fix="evaluate the folder without the recipe, or name the recipe that it was made from",
                )  # fmt: skip
        return {"read": model.read_block, "folder": folder, "step": None, "run": None}
    with context.watchdog.allow(float(recipe.timeout_s.start), "reading checkpoints"):
        ranks = Together.of(context)
        one = context.from_main((folder / MANIFEST).is_file())
        checkpoint = open_checkpoint(folder, ranks) if one else latest(folder, recipe, ranks=ranks)
    checkpoint.require(expected, dtypes=False, moments=False)
    run = checkpoint.folder.absolute().parent.parent
    return {
        "read": checkpoint.block, "folder": checkpoint.folder, "step": checkpoint.step,
        "run": run if (run / "metrics.jsonl").is_file() else None,
    }  # fmt: skip


def _shape(shape: Sequence[int] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def append_to_run(run: Location, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends rows to a run's metrics.jsonl. One in a store that goes on would overwrite them: a note says so."""
    from tpshard.train.records.records import append
    from tpshard.train.run.run_store import append_to_store

    if isinstance(run, Path):
        append(run / "metrics.jsonl", rows)
    elif not append_to_store(run, rows):
        print(f"note: {run} is being trained: its record does not get this evaluation", file=sys.stderr)


def _record(run: Location, recipe: Recipe, result: Mapping[str, Any]) -> None:
    """Appends each loss to a run's metrics.jsonl, and sends it to the run's wandb, if it has one."""
    import time

    from tpshard.train.run.run_store import fetched_run

    rows = [
        {
            "step": result["step"], "eval_loss": one["loss"], "eval_tokens": one["tokens"], "eval_data": one["data"],
            "eval_sequences": one["sequences"], "time": time.time(),
        }
        for one in result["results"]
    ]  # fmt: skip
    append_to_run(run, rows)
    folder = run if isinstance(run, Path) else fetched_run(run)
    options, id_file = recipe.logging.wandb, folder / "wandb" / "id"
    if options is None or options.mode == "disabled" or not id_file.is_file():
        return
    from tpshard.train.records.wandb_sink import WandbSink

    sink = WandbSink(folder, options, name=recipe.name, config={}, run_id=id_file.read_text().strip() or None)
    for row in rows:
        sink(row)
    sink.close({"eval_loss": result["loss"]})


def table(result: Mapping[str, Any]) -> str:
    """The losses as text, a line per text."""
    at = f", step {result['step']}" if result["step"] is not None else ""
    lines = [f"{result['model']}{at}, sequences of {result['seq_len']} tokens in {result['dtype']}"]
    width = max(len(one["data"]) for one in result["results"])
    lines.append(f"  {'data':<{width}}      loss  perplexity      tokens  sequences")
    for one in result["results"]:
        if one["loss"] is None:
            lines.append(f"  {one['data']:<{width}}  no target token")
            continue
        figures = f"{one['loss']:>8.4f}  {one['perplexity']:>10.4g}  {one['tokens']:>10,}  {one['sequences']:>9,}"
        lines.append(f"  {one['data']:<{width}}  {figures}")
    return "\n".join(lines)
