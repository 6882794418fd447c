"""Server processes: ranks that die or hang are replaced, requests are drained, bad starts are refused early."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from commands import COMMAND
from forked import Copied
from patience import PATIENCE, until
from servers import WORKER, job_of, ranks_of
from tpshard.cli.main import run as run_command
from tpshard.cli.shared.sources import open_source
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.models import to_hf
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.serve.engine.engine import Engine
from tpshard.serve.engine.job import Frame, send
from tpshard.serve.engine.ranks import Ranks
from tpshard.serve.engine.runner import ProgramRunner
from tpshard.serve.engine.step import WorkerLost
from web import web


@pytest.fixture(scope="module")
def folder(model: torch.nn.Module, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("hf") / "model"
    to_hf(model, result, tokenizer=tokenizer_folder)
    return result


FEW = ("serve.requests=8", "serve.step_tokens=8")
"""Changes that leave a server few programs to build."""


SAMPLINGS = (
    Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.2, logit_bias=((7, 2.0), (190, 1.5))),
    Sampling(temperature=1.5, min_p=0.01, seed=4, logprobs=2),
    Sampling(temperature=1.0, top_k=40, top_p=0.9, seed=5, presence_penalty=0.5),
    Sampling(temperature=4.0, top_p=0.95, seed=6),
)


def answers(runner: Any) -> list[list[int]]:
    engine = Engine(runner)
    sequences = [Sequence(tuple(range(2, 2 + n)), s, 12) for n, s in zip((3, 20, 90, 5), SAMPLINGS)]
    for s in sequences:
        engine.add(s)
    while engine.busy:
        engine.step()
    return [s.tokens for s in sequences]


def pids_of(ranks: Ranks) -> list[int]:
    return [worker.process.pid for worker in ranks._workers.all]


def wait_for_all(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def test_two_ranks_answer_like_one_and_their_death_is_noticed(
    folder: Path, runner: ProgramRunner, copies: None
) -> None:
    ranks = ranks_of(folder, "serve.mesh.tp=2", *FEW)
    try:
        assert answers(ranks) == answers(runner)
        pids = pids_of(ranks)
        listening = [c for pid in pids for c in psutil.Process(pid).net_connections() if c.status == "LISTEN"]
        assert all(c.laddr.ip in ("127.0.0.1", "::1") for c in listening)
        ranks.check()
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="rank 1 was lost: it was stopped by a signal"):
            answers(ranks)
        assert wait_for_all(pids)
        with pytest.raises(WorkerLost, match="rank 0 was lost between requests"):
            ranks.check()
    finally:
        ranks.close()


def test_a_rank_without_memory_in_the_middle_of_decoding_is_lost_and_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")  # large pages may hold all that a step allocates
    ranks = ranks_of(folder, "serve.mesh.tp=2", *FEW, step_s=20.0)
    try:
        engine = Engine(ranks)
        engine.add(Sequence(tuple(range(2, 400)), Sampling(temperature=0), 100))
        for _ in range(3):
            engine.step()
        pids = pids_of(ranks)
        psutil.Process(pids[1]).rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20))  # no allocation succeeds from here on
        with pytest.raises(WorkerLost, match="rank 1 was lost"):
            while engine.busy:
                engine.step()
        assert wait_for_all(pids)
    finally:
        ranks.close()


def test_a_worker_that_says_nothing_is_lost(folder: Path) -> None:
    with pytest.raises(WorkerLost, match=r"rank 0 did not answer within 0.3 s"):
        Ranks([sys.executable, "-c", "import time; time.sleep(60)"], job_of(folder, *FEW, start_s=0.3))


def test_workers_that_read_weights_have_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as one of them says now and then that it does."""
    channels = [socket.socketpair() for _ in range(2)]
    now, frames = (
        [0.0],
        [(0, Frame.LOADING), (1, Frame.LOADING), (0, Frame.READY), (1, Frame.LOADING), (1, Frame.READY)],
    )

    class Silent:
        """Workers that say something after every second silence of 400 s."""

        has_failure, reports_complete, living, all = False, False, (), ()

        def listen(self, seconds: float) -> list[int]:
            now[0] += 200
            if now[0] % 400 or not frames:
                return []
            rank, kind = frames.pop(0)
            send(channels[rank][1], kind)
            return [rank]

        def kill(self) -> None:
            pass

    monkeypatch.setattr("tpshard.serve.engine.ranks.time", SimpleNamespace(monotonic=lambda: now[0]))
    ranks = object.__new__(Ranks)
    ranks._channels, ranks._workers = [ours for ours, _ in channels], Silent()  # type: ignore[assignment]
    assert set(ranks._await(Frame.READY, {0, 1}, 600)) == {0, 1}
    with pytest.raises(WorkerLost, match="rank 0 did not answer within 600 s"):
        ranks._await(Frame.READY, {0}, 600)


def test_a_worker_that_cannot_start_says_why(folder: Path, tmp_path: Path, copies: None) -> None:
    with pytest.raises(WorkerLost, match="rank 0 was lost: there is no recipe"):
        Ranks(WORKER, job_of(folder, *FEW, source=str(tmp_path)))


def test_ranks_that_build_other_programs_than_were_planned_do_not_start(folder: Path, copies: None) -> None:
    with pytest.raises(WorkerLost, match="programs differ from the server's"):
        Ranks(WORKER, job_of(folder, *FEW, programs=({"rows": 8, "fingerprint": "another"},)))


RECIPE = "name: served\ncluster: {device: cpu}\nmodel: {preset: tiny}\n"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path := tmp_path_factory.mktemp("served") / "recipe.yaml").write_text(RECIPE)
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_ended_while_it_starts_leaves_nothing(
    number: signal.Signals, recipe: Path, folder: Path, tmp_path: Path
) -> None:
    overrides = [f"serve.checkpoint={folder}", "serve.port=0", "serve.mesh.tp=1", *FEW]
    (tmp_path / "scratch").mkdir()
    elsewhere = {"TMPDIR": str(tmp_path / "scratch"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    environment = os.environ | elsewhere
    code = f"import tempfile; tempfile.tempdir = None; {COMMAND}"  # or the copied process's would be used
    process = Copied(code, "serve", str(recipe), *overrides, environment=environment)
    try:
        until(lambda: process.poll() is not None or psutil.Process(process.pid).children(), "a worker")
        workers = psutil.Process(process.pid).children()
        process.send_signal(number)
        assert process.wait() == (0 if number == signal.SIGTERM else -number)
        assert ("ended before it was ready" in process.communicate()[1]) == (number == signal.SIGTERM)
        psutil.wait_procs(workers, PATIENCE)
        assert wait_for_all([worker.pid for worker in workers])
        assert not list((tmp_path / "scratch").iterdir())
    finally:
        process.kill()


class Process:
    """A process that runs `tpshard serve`."""

    def __init__(self, recipe: Path, folder: Path, *overrides: str) -> None:
        changes = [f"serve.checkpoint={folder}", "serve.port=0", "serve.cache_mb=4", *FEW, *overrides]
        environment = {k: v for k, v in os.environ.items() if k != "TPSHARD_API_KEY"} | {"OMP_NUM_THREADS": "1"}
        line = ["serve", str(recipe), *changes]
        self.process = Copied(COMMAND, *line, environment=environment, folder=recipe.parent)
        until(lambda: self.process.poll() is not None or "\n" in self.process.printed()[0], "the server's start")
        out, err = self.process.printed()
        assert out.startswith("serving served on http://"), out + err
        self.url = out.split()[3].removesuffix("/v1")
        self.workers = [child.pid for child in psutil.Process(self.process.pid).children()]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def process(recipe: Path, folder: Path) -> Iterator[Process]:
    """One server for the tests that ask it, of which the last one ends it."""
    result = Process(recipe, folder, "serve.mesh.tp=2", f"serve.grace_s={PATIENCE}", "logging.wandb.mode=offline")
    yield result
    result.end()


def test_what_is_planned_is_what_is_checked_and_what_answers(
    process: Process, recipe: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    overrides = [f"serve.checkpoint={folder}", "serve.mesh.tp=2", *FEW]
    actual = [web.get(process.url + "/health").json()["programs"]]
    # neither the cache's size nor the port is the program's
    checked = [
        ["serve", str(recipe), "--check", "--json", "serve.cache_mb=7", *overrides],
        *(["plan", str(recipe), "--for", what, "--dry-run", "--json", *overrides] for what in ("decode", "prefill")),
    ]
    for arguments in checked:
        assert run_command(arguments) == 0
        actual.append(json.loads(capsys.readouterr().out)["programs"])
    assert [one["rows"] for one in actual[0]] == [1, 2, 4, 8]
    assert actual == [actual[0]] * 4


def test_a_server_survives_its_worker_and_drains_at_the_end(process: Process, recipe: Path) -> None:
    body = {"model": "served", "prompt": "the quick", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    url = process.url + "/v1/completions"
    first = web.post(url, json=body).json()["choices"][0]["text"]
    long = body | {"stream": True, "max_tokens": 480}
    with web.stream("POST", url, json=long) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(process.workers[1], signal.SIGKILL)
        assert any("error" in line for line in lines)  # in-flight requests are told, at once
    assert web.get(process.url + "/health").status_code == 503
    assert web.post(url, json=body).status_code == 503
    until(lambda: web.get(process.url + "/health").status_code == 200, "another worker")
    assert web.post(url, json=body).json()["choices"][0]["text"] == first

    with web.stream("POST", url, json=long) as stream:
        lines = stream.iter_lines()
        next(lines)
        workers = [child.pid for child in psutil.Process(process.process.pid).children()]
        process.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        process.process.send_signal(signal.SIGTERM)  # a wrapper's copy changes nothing
        assert web.get(process.url + "/ready").status_code == 503
        assert web.get(process.url + "/health").status_code == 200
        assert web.post(url, json=body).status_code == 503
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.process.wait(PATIENCE) == 0
    assert wait_for_all(workers)
    (record,) = recipe.parent.rglob("offline-run-*/*.wandb")  # the recipe said so
    assert all(part in record.read_bytes() for part in (b"serve/kv_blocks", b"served-serve", b"global_sequences"))


@pytest.fixture
def fails(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the command in this process; returns its exit code and its errors."""
    monkeypatch.delenv("TPSHARD_API_KEY", raising=False)
    monkeypatch.chdir(recipe.parent)

    def run(*overrides: str) -> tuple[int, str]:
        code = run_command(["serve", str(recipe), *overrides])
        printed = capsys.readouterr().err
        assert "Traceback" not in printed
        return code, printed

    return run


def denial() -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_what_cannot_be_served_is_refused_before_it_is_loaded(
    fails: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, output = fails(f"serve.checkpoint={folder}", "serve.mesh.tp=1", f"serve.port={port}")
        assert code == 5 and f"port {port}" in output and "another program" in output
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "bind", lambda *_: denial())
        code, output = fails(f"serve.checkpoint={folder}", "serve.mesh.tp=1", "serve.port=80")
        assert code == 5 and "port 80" in output and "choose a higher" in output
    code, output = fails(f"serve.checkpoint={folder}", "serve.host=0.0.0.0")
    assert code == 2 and "--insecure" in output
    code, output = fails()
    assert code == 7 and "no checkpoint" in output
    (tmp_path / "writing").mkdir()  # a checkpoint gets its manifest last
    (tmp_path / "writing" / "rank-0.safetensors").write_bytes(b"\0" * 64)
    code, output = fails(f"serve.checkpoint={tmp_path / 'writing'}")
    assert code == 7 and "being written gets its manifest last" in output


@pytest.mark.parametrize("what", ["auto_map", "index", "symlink"])
def test_a_folder_that_reaches_out_is_refused(what: str, recipe: Path, folder: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for file in folder.iterdir():
        (hostile / file.name).write_bytes(file.read_bytes())
    config = json.loads((hostile / "config.json").read_text())
    weights = hostile / "model.safetensors"
    outside = tmp_path / "x.safetensors"
    outside.write_bytes(weights.read_bytes())
    if what == "auto_map":
        (hostile / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "evil.Model"}}))
        (hostile / "evil.py").write_text("raise SystemExit('executed')")
    elif what == "index":
        weights.unlink()
        names = ["model.embed_tokens.weight"]
        (hostile / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(names, "../x.safetensors")})
        )
    else:
        weights.unlink()
        weights.symlink_to(outside)
    with pytest.raises(Mistakes, match="cannot be read"):
        open_source(str(hostile))
