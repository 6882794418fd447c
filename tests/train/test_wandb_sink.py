"""wandb gets the run's rows and nothing else, and its failures cost the run at most one warning."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from patience import PATIENCE, until
from tpshard.cli import serve
from tpshard.recipes.keys.training_keys import Wandb
from tpshard.recipes.reading.load import loads
from tpshard.train.records.wandb_sink import WandbSink

FAKE = """
import os, time, types
how = os.environ["FAKE_WANDB"]
Settings = lambda **settings: settings
class Summary(dict): pass
class Run:
    offline, dir, url = True, "/nowhere/files", None
    def __init__(self, mode, id, resume):
        self.summary = Summary()
        self.out = open(os.environ["FAKE_OUT"], "a", buffering=1)
        self.out.write(f"init {mode}\\n" if id is None else f"init {mode} {id} {resume}\\n")
    def log(self, values, step=None):
        if how == "dies": os._exit(11)
        if how == "disk full": raise OSError(28, "No space left on device")
        self.out.write(f"log {step} {sorted(values)}\\n")
    def finish(self, exit_code=0):
        if how == "hangs at the end": time.sleep(1000)
        self.out.write(f"finish {exit_code} {dict(self.summary)}\\n")
def init(mode=None, id=None, resume=None, **_):
    if how == "hangs in init": time.sleep(1000)
    if how == "raises in init": raise RuntimeError("no")
    if how == "unreachable" and mode == "online": raise TimeoutError("no network")
    return Run(mode, id, resume)
if how == "cannot be imported": raise ImportError("broken install")
"""


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_login: None) -> Iterator[Path]:
    """A wandb that fails as $FAKE_WANDB says; yields the file that tells what reached it."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(FAKE)
    paths = [str(tmp_path / "fake"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("FAKE_OUT", str(tmp_path / "out"))
    monkeypatch.setenv("FAKE_WANDB", "works")
    yield tmp_path / "out"


def wait_for(path: Path, text: str) -> str:
    until(lambda: path.exists() and text in path.read_text(), repr(text))
    return path.read_text()


def sink(
    folder: Path, warnings: list[str], mode: str = "auto", config: dict[str, object] | None = None,
    run_id: str | None = None,
) -> WandbSink:  # fmt: skip
    return WandbSink(
        folder, Wandb(mode=mode), name="quickstart", config=config or {}, run_id=run_id,  # type: ignore[arg-type]
        warn=warnings.append,
    )  # fmt: skip


@pytest.mark.parametrize(
    "how",
    ["hangs in init", "raises in init", "cannot be imported", "dies", "disk full", "hangs at the end"],
)
def test_every_failure_is_one_warning_and_costs_the_run_no_time(
    how: str, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WANDB", how)
    warnings: list[str] = []
    before = set(psutil.Process().children(recursive=True))
    run = sink(tmp_path, warnings)
    children = set(psutil.Process().children(recursive=True)) - before
    slowest = 0.0
    for step in range(50):
        began = time.perf_counter()
        run({"step": step, "loss": 1.0, "note": "x" * 2000})
        slowest = max(slowest, time.perf_counter() - began)
        time.sleep(0.005)
    assert slowest < PATIENCE  # what hangs would hang for 1,000 s
    began = time.perf_counter()
    run.close({"loss": 1.0}, wait_s=PATIENCE if "hangs" not in how else 1)
    assert time.perf_counter() - began < PATIENCE
    assert len(warnings) == 1 and "the run goes on" in warnings[0], warnings
    run({"step": 99})
    run.close({})
    assert len(warnings) == 1
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_rows_and_summary_arrive_in_order(fake: Path, tmp_path: Path) -> None:
    warnings: list[str] = []
    run = sink(tmp_path, warnings)
    for step in (1, 2):
        run({"step": step, "loss": 2.5, "mfu": None})
    run.close({"eval_loss": 2.0}, exit_code=75, wait_s=PATIENCE)
    assert fake.read_text().splitlines() == [
        "init offline", "log 1 ['loss']", "log 2 ['loss']", "finish 75 {'eval_loss': 2.0}",
    ]  # fmt: skip
    assert not warnings


@pytest.mark.parametrize(("mode", "resume"), [("online", "allow"), ("offline", "None")])
def test_a_run_that_goes_on_is_the_same_run(mode: str, resume: str, fake: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        run = sink(tmp_path, [], mode, run_id="abc123")
        run({"step": step, "loss": 1.0})
        run.close({}, wait_s=PATIENCE)
    lines = fake.read_text().splitlines()
    assert [line for line in lines if line.startswith("init")] == [f"init {mode} abc123 {resume}"] * 2
    assert [line for line in lines if line.startswith("log")] == ["log 1 ['loss']", "log 2 ['loss']"]


@pytest.mark.parametrize("login", ["WANDB_API_KEY", "netrc", "WANDB_MODE", "none"])
def test_auto_is_online_with_a_login_and_offline_without(
    login: str, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if login == "netrc":
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
        (tmp_path / "netrc").chmod(0o600)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    elif login != "none":
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    if login == "WANDB_MODE":
        monkeypatch.setenv("WANDB_MODE", "offline")
    run = sink(tmp_path, [])
    run.close({}, wait_s=PATIENCE)
    online = login in ("WANDB_API_KEY", "netrc")
    assert fake.read_text().splitlines()[0] == ("init online" if online else "init offline")


def test_an_unreachable_server_is_one_warning_and_an_offline_run(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WANDB", "unreachable")
    warnings: list[str] = []
    run = sink(tmp_path, warnings, "online")
    run({"step": 1, "loss": 1.0})
    run.close({}, wait_s=PATIENCE)
    assert "init offline\nlog 1" in fake.read_text()
    assert len(warnings) == 1 and "cannot reach its server" in warnings[0]


def test_when_the_run_dies_wandb_ends_by_itself(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WANDB", "hangs in init")
    run = sink(tmp_path, [])
    child = run._child
    assert child is not None and child.stdin is not None
    child.stdin.close()  # as the system does for a killed process
    assert child.wait(PATIENCE) == 1
    run.close({})


def test_disabled_starts_nothing(tmp_path: Path) -> None:
    before = len(psutil.Process().children())
    run = sink(tmp_path, [], "disabled")
    run({"step": 1})
    run.close({})
    assert len(psutil.Process().children()) == before and not list(tmp_path.iterdir())


def test_the_real_wandb_gets_configuration_metrics_and_summary_and_nothing_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_login: None
) -> None:
    monkeypatch.setenv("PLANTED_SECRET", "planted-in-the-environment")
    monkeypatch.chdir(Path(__file__).parent)  # inside of a git repository
    warnings: list[str] = []
    run = sink(tmp_path, warnings, config={"mesh": {"tp": 2}, "optimizer": {"name": "planted-in-the-config"}})
    for step in range(1, 4):
        run({"step": step, "loss": 7.0 - step, "planted_metric": 1.0})
    run.close({"planted_summary": 3.5}, wait_s=PATIENCE)
    assert not warnings
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    (record,) = [path for path in files if path.suffix == ".wandb"]
    assert "offline-run" in str(record)
    sent = record.read_bytes()
    for expected in ("planted-in-the-config", "planted_metric", "planted_summary", "quickstart"):
        assert expected.encode() in sent, expected
    private = [
        "planted-in-the-environment", str(Path.home()), os.getcwd(), "wandb_process", "diff --git", os.uname().release,
    ]  # fmt: skip
    if len(socket.gethostname()) > 4:  # a shorter one is found in any few kilobytes
        private.append(socket.gethostname())
    for text in private:
        assert text.encode() not in sent, text
    names = {path.name for path in files}
    assert not names & {"requirements.txt", "wandb-metadata.json", "diff.patch", "output.log"}, names
    assert not [path for path in files if "code" in path.parts or path.suffix in (".py", ".patch")]


def test_a_server_logs_to_the_team_that_its_recipe_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(WandbSink, "_start", lambda self, folder: None)
    monkeypatch.setattr(WandbSink, "_send", lambda self, message: sent.append(message))
    monkeypatch.setenv("TEAM", "ours")
    logging = 'logging: {wandb: {project: "served", entity: "${oc.env:TEAM}"}}'
    recipe = loads(f"model: {{preset: tiny}}\n{logging}", [f"run.dir={tmp_path}"])
    serve._to_wandb(recipe, SimpleNamespace(metrics=SimpleNamespace(snapshot=dict)))()  # type: ignore[arg-type]
    assert (sent[0]["init"]["project"], sent[0]["init"]["entity"]) == ("served", "ours")
