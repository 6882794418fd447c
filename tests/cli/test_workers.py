"""A worker's error is readable, and a recipe gets the right number of workers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from test_rooms import FLOOR
from tpshard.cli.shared import worker_errors
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.files.folder_json import FolderError
from tpshard.parallelism.runtime.launcher import Nodes
from tpshard.parallelism.runtime.messages import WorkerFault
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine import server_worker


def test_every_kind_of_error_has_its_words_and_its_exit_code() -> None:
    text, code = worker_errors.describe(Mistakes.one("no text", exit=Exit.DATA, fix="some text"))
    assert code == 6 and "no text" in text and "some text" in text
    text, code = worker_errors.describe(WorkerFault("the ranks do not agree", exit=5, fix="the same everywhere"))
    assert code == 5 and "error: the ranks do not agree" in text and "the same everywhere" in text
    text, code = worker_errors.describe(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"))
    assert code == 4 and "Tried to allocate 2 GiB" in text and "remat: full" in text
    text, code = worker_errors.describe(FolderError("w holds NaN", "an earlier checkpoint"))
    assert code == 7 and "error: w holds NaN" in text and "an earlier checkpoint" in text
    assert server_worker.describe(FolderError("w holds NaN", "an earlier checkpoint")) == ("w holds NaN", 7)
    assert worker_errors.describe(KeyboardInterrupt()) == ("interrupted", 130)


def test_a_bug_is_shown_whole_and_called_a_bug() -> None:
    try:
        raise KeyError("planted")
    except KeyError as error:
        text, code = worker_errors.describe(error)
    assert code == 1 and "test_workers.py" in text and "planted" in text and "This is a bug" in text


@pytest.mark.parametrize(
    ("mesh", "cluster", "nodes", "gpus", "world"),
    [
        ("{fsdp: 2, tp: 2}", None, 1, 0, 4),
        ("{fsdp: -1}", None, 1, 0, 1),
        ("{fsdp: -1}", None, 1, 8, 8),
        ("{fsdp: -1, tp: 2}", None, 2, 8, 16),
        ("{fsdp: 2}", "{device: cpu}", 1, 0, 2),
        ("{fsdp: -1, tp: 4}", "{device: cpu, nodes: 2, devices_per_node: 8}", 2, 0, 16),
    ],
)
def test_the_mesh_and_the_machine_say_how_many_workers(
    mesh: str, cluster: str | None, nodes: int, gpus: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_errors, "visible_gpus", lambda: gpus)
    text = f"model: {{preset: tiny}}\nmesh: {mesh}\n" + (f"cluster: {cluster}\n" if cluster else "")
    assert worker_errors.workers_of(loads(text), Nodes(nodes, 0, "h:1")) == world


def test_a_mesh_that_does_not_fit_the_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_errors, "visible_gpus", lambda: 4)
    with pytest.raises(Mistakes) as wrong:
        worker_errors.workers_of(loads("model: {preset: tiny}\nmesh: {fsdp: 3}"), Nodes())
    assert wrong.value.exit == Exit.MACHINE and "fsdp: 4" in wrong.value.diagnostics[0].fix


def test_hidden_gpus_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpshard.devices import machine

    eight = machine.Driver("550", tuple(machine.Gpu(i, "H100", 0, 0, "9.0", False, ()) for i in range(8)))
    monkeypatch.setattr(machine, "probe_driver", lambda: eight)
    assert worker_errors.visible_gpus({}) == 8
    assert worker_errors.visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert worker_errors.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert worker_errors.visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


def test_no_process_imports_the_files_of_the_working_directory_in_place_of_pythons() -> None:
    """Every command line for Python itself has -P."""
    root = Path(__file__).parents[2]
    commands = {
        f"{path}:{node.lineno}": ast.unparse(node)
        for path in root.glob("*/**/*.py")
        if path.relative_to(root).parts[0] in FLOOR
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List) and ast.unparse(node).startswith("[sys.executable")
    }
    assert len(commands) >= 9
    for place, command in commands.items():
        assert command.startswith("[sys.executable, '-P'"), place
