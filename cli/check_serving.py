"""`tpshard check RUN --serving`: the training program's log-probabilities beside the server's, on a run's own rows."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tpshard.diagnostics.diagnostic import Exit, Mistakes

if TYPE_CHECKING:
    from tpshard.parallelism.runtime.context import Context
    from tpshard.parallelism.runtime.place import WorkerPlace
    from tpshard.programs.compare.token_scores import Agreement, ScoredRow
    from tpshard.programs.setting.setting import Setting
    from tpshard.recipes.keys.schema import Recipe
    from tpshard.serve.api.service import Service

SCORES = "TPSHARD_SCORES"
"""The environment variable with the changes of a worker's recipe, and the file that rank 0 writes."""
ROWS = 4
"""Held-out rows that are compared where nobody says how many."""
AS_SERVED = ("loss.chunks=1", "model.capacity=null")
"""The changes with which a training program gives whole logits, and drops no token: no server drops one."""


def check_serving(source: str, overrides: Sequence[str], rows: int, as_json: bool) -> int:
    """Prints how the server's log-probabilities of held-out tokens differ from the training program's; returns 0 if
    rounding explains it, else 1."""
    from tpshard.cli.evaluate import READ, recipe_of, stored_place
    from tpshard.cli.shared.arguments import refuse_unread
    from tpshard.parallelism.runtime import place as places

    place = places.find(os.environ)
    if place is not None:
        changes, file = json.loads(os.environ.pop(SCORES))
        _work(source, recipe_of(source, changes), place, Path(file))
    refuse_unread("check --serving", overrides, READ, "the model and its training are stored")
    changes = [*overrides, f"evaluate.sequences={rows}", *AS_SERVED]
    recipe = recipe_of(source, changes)
    if recipe.task != "lm":
        raise Mistakes.one(
            f"a server does not answer a model with `task: {recipe.task}`", exit=Exit.FIT, where=recipe.where("task"),
            fix="--serving is for task: lm",
        )  # fmt: skip
    stored_place(source, recipe)
    code, scored = _train_scores(source, changes, recipe)
    if scored is None:
        return code
    agreement, about = compare_with_server(source, recipe, scored)
    if as_json:
        print(json.dumps(agreement.to_json() | about, indent=1))
    else:
        print(f"{about['model']} in {about['dtype']}: trained on {about['mesh']}, served on {about['serve_mesh']}")
        print("\n".join([*(f"note: {note}" for note in about["notes"]), str(agreement)]))
    return Exit.DONE if agreement.agrees else Exit.BUG


def _train_scores(source: str, changes: Sequence[str], recipe: Recipe) -> tuple[int, list[ScoredRow] | None]:
    """The workers' exit code, and what they scored."""
    from tpshard.cli.shared.worker_errors import workers_of
    from tpshard.devices import machine
    from tpshard.parallelism.runtime.launcher import Nodes, launch
    from tpshard.programs.compare.token_scores import ScoredRow, TokenScore

    machine.require(recipe)
    nodes = Nodes.of(os.environ)
    with tempfile.TemporaryDirectory(prefix="tpshard-check-") as scratch:
        file = Path(scratch, "scores.json")
        command = [sys.executable, "-P", "-m", "tpshard.cli.main", "check", source, "--serving"]
        env = {SCORES: json.dumps([list(changes), str(file)])}
        code = launch(command, world=workers_of(recipe, nodes), nodes=nodes, env=env)
        if code or not file.is_file():
            return code, None
        read = json.loads(file.read_text())
    return code, [ScoredRow(t, d, [TokenScore(*score) for score in scores]) for t, d, scores in read]


def _work(source: str, recipe: Recipe, place: WorkerPlace, file: Path) -> NoReturn:
    from tpshard.cli.shared.worker_errors import describe, device_of_worker
    from tpshard.parallelism.runtime.worker import run_worker

    def body() -> int:
        from tpshard.parallelism.runtime.context import connect
        from tpshard.programs.setting.setting import Setting

        setting, limits = Setting.of(recipe, place.world), recipe.timeout_s
        with connect(
            place, setting.mesh, device=device_of_worker(recipe, place), start_s=limits.start, step_s=limits.step
        ) as context:
            rows = scores_of(source, setting, context)
        if place.rank == 0:
            file.write_text(json.dumps([[row.tokens, row.documents, row.scores] for row in rows]))
        return Exit.DONE

    run_worker(body, place, describe)


def scores_of(source: str, setting: Setting, context: Context) -> list[ScoredRow]:
    """Held-out rows of the model in SOURCE, scored by its training program. Every rank calls it."""
    from tpshard.cli.evaluate import open_stored
    from tpshard.train.run.evaluation import scored_rows

    def read(expected: Mapping[str, Any]) -> Any:
        return open_stored(source, setting.recipe, context, expected)["read"]

    return scored_rows(setting, context, read)


def compare_with_server(source: str, recipe: Recipe, rows: Sequence[ScoredRow]) -> tuple[Agreement, dict[str, Any]]:
    """How the server's log-probabilities of the rows' targets differ, and what was compared. It computes in the
    training program's dtype, whatever `serve.dtype` says."""
    from tpshard.cli.evaluate import stored_place
    from tpshard.cli.serve import memory_need, start_service, stored_model
    from tpshard.cli.shared.sources import holds_model, latest, open_source
    from tpshard.programs.compare.token_scores import Agreement
    from tpshard.programs.setting.cluster import devices_of
    from tpshard.recipes.reading.load import with_changes

    dtype = recipe.fsdp.param_dtype
    served = with_changes(recipe, ["serve.checkpoint=latest", f"serve.dtype={dtype}"])
    place = stored_place(source, recipe)
    name = str(place if holds_model(place) else latest(place, recipe).folder)
    model = open_source(name, modules=True, trusted=recipe)
    need = memory_need(served, stored_model(served, model))
    service = start_service(served, model, need)
    try:
        server = _server_scores(service, rows)
    finally:
        service.close()
    about = {
        "model": name, "dtype": dtype, "notes": need.programs.notes,
        "mesh": _mesh(recipe.mesh_on(devices_of(recipe))), "serve_mesh": _mesh(served.serve.mesh),
    }  # fmt: skip
    return Agreement.of(rows, server), about


def _server_scores(service: Service, rows: Sequence[ScoredRow]) -> dict[tuple[int, int], float]:
    """The server's log-probability of the target at each (row, position)."""
    from tpshard.cli.shared.evaluation_tasks import run_to_end
    from tpshard.programs.scheduling.request import Sampling, Sequence

    documents = [part for number, row in enumerate(rows) for part in row.parts(number, service.limit)]
    sampling = Sampling(temperature=0.0, logprobs=0)
    asked = [Sequence(part.prompt, sampling, 0, prompt_logprobs=True) for part in documents]
    run_to_end(service, asked)
    return {
        (part.row, part.start + i): score.logprob
        for part, answer in zip(documents, asked) for i, score in enumerate(answer.prompt_scores)
    }  # fmt: skip


def _mesh(axes: Any) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in axes.items() if size != 1) or "one device"
