"""A run in an object store: bit-exact on any mesh, whole after any kill or fault, without a disk that hosts share."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import python
from local_store import BUCKET, SECRETS, LocalStore, enter, local_store
from test_checkpoint import assert_holds, model, save_on, shards
from tpshard.cli.main import run
from tpshard.cli.preflight.preflight import load_checked
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.parallelism.runtime.context import Context
from tpshard.recipes.keys.stores import wrong_store
from tpshard.recipes.reading.load import loads
from tpshard.train.checkpoints import store_path
from tpshard.train.checkpoints.checkpoint import SaveFailed, clean, save, steps
from tpshard.train.checkpoints.restore import SavedCheckpoint, newest, open_checkpoint
from tpshard.train.checkpoints.shards import Shard
from tpshard.train.checkpoints.store_path import StoreError, StorePath
from tpshard.train.checkpoints.verify import sha256_of
from tpshard.train.run import store_lock
from tpshard.train.run.run_lock import Holder, Taken
from tpshard.train.run.run_store import RunStore
from tpshard.train.run.store_lock import StoreLock
from training_cases import train_recipe


@pytest.fixture(scope="module")
def store() -> Iterator[LocalStore]:
    with local_store() as running:
        yield running


@pytest.fixture
def place(store: LocalStore, request: pytest.FixtureRequest) -> Iterator[StorePath]:
    """An empty prefix of the store, which does not fail."""
    store.fails = lambda method, path: False
    yield StorePath(f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '').replace(' ', '-')}")
    store.fails = lambda method, path: False


# ---- checkpoints ----------------------------------------------------------------------------------------------


def test_a_checkpoint_of_any_mesh_is_read_on_any_other_by_ranges(
    place: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = model() | {"wide": torch.randn(64, 1500)}
    assert save_on(4, place, 5, lambda rank: shards(tensors, 4, 1, rank)) == [place / "step-000005"] * 4
    actual = open_checkpoint(place / "step-000005")
    assert_holds(actual, tensors)
    sizes: list[int] = []
    real = StorePath.read_bytes

    def counted(self: StorePath, start: int | None = None, end: int | None = None) -> bytes:
        data = real(self, start, end)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(StorePath, "read_bytes", counted)
    monkeypatch.setattr("tpshard.train.checkpoints.shards.FIRST", 64)
    for other_fsdp, other_tp in [(8, 1), (2, 3)]:
        for rank in range(other_fsdp * other_tp):
            actual = SavedCheckpoint(place / "step-000005")
            sizes.clear()
            for name, shard in shards(tensors, other_fsdp, other_tp, rank).items():
                assert torch.equal(actual.block(name, shard.starts, shard.tensor.shape), shard.tensor), (name, rank)
            assert sum(sizes) < 64 * 1500 * 4 / other_fsdp + 16_000, "the rows of its blocks, and the files' headers"


def test_a_large_file_is_sent_in_parts_and_summed_as_it_is_sent(
    place: StorePath, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_path, "PART", 5 << 20)
    big = {"w": Shard.whole(torch.randn(3_300_000))}
    store.requests.clear()
    save(place, 1, big, {})
    parts = [path for method, path in store.requests if method == "PUT" and "partNumber" in path]
    assert len(parts) == 3
    checkpoint = open_checkpoint(place / "step-000001")
    assert torch.equal(checkpoint.tensor("w"), big["w"].tensor)
    ((name, file),) = checkpoint.files.items()
    read: list[int] = []
    assert sha256_of(place / "step-000001" / name, read.append) == file["sha256"]
    assert len(read) == 3 and sum(read) == file["bytes"]


def test_the_last_ones_are_kept_and_a_course_that_was_left_is_neither_resumed_from_nor_lost(place: StorePath) -> None:
    for step in (10, 20, 30, 40):
        save(place, step, shards(model(step), 1, 1, 0), {}, keep_last=3)
    assert list(steps(place)) == [20, 30, 40]
    save(place, 25, shards(model(25), 1, 1, 0), {}, keep_last=2)  # after going back to 20
    clean(place)  # as the next start does
    assert list(steps(place)) == [20, 25]
    aside = {name.partition("/")[0] for name in place.files() if name.endswith("superseded.json")}
    assert aside == {"step-000030", "step-000040"} and any("step-000040/rank" in name for name in place.files())


def test_saving_a_step_again_replaces_it(place: StorePath) -> None:
    save(place, 7, shards(model(1), 1, 1, 0), {})
    save(place, 7, shards(model(2), 1, 1, 0), {})
    assert_holds(open_checkpoint(place / "step-000007"), model(2))
    assert len(place.files()) == 2


@pytest.mark.parametrize("damage", ["changed", "cut short", "missing", "copied"])
def test_an_object_that_is_not_the_one_written_is_noticed(damage: str, place: StorePath) -> None:
    """A copy has another tag and the same bytes: those are read and summed."""
    for step in (1, 2):
        save(place, step, shards(model(step), 1, 1, 0), {})
    ((name, _),) = SavedCheckpoint(place / "step-000002").files.items()
    file = place / "step-000002" / name
    data = bytearray(file.read_bytes())
    if damage == "changed":
        data[-3] ^= 16
    file.unlink()
    if damage == "copied":
        manifest = place / "step-000002" / "manifest.json"
        altered = json.loads(manifest.read_bytes())
        altered["files"][name]["tag"] = "of another store"
        from tpshard.train.checkpoints.checkpoint import manifest_sum

        altered["sha256"] = manifest_sum(altered)
        manifest.write_bytes(json.dumps(altered).encode())
    if damage != "missing":
        file.write_bytes(bytes(data[:-1]) if damage == "cut short" else bytes(data))
    actual = newest(place)
    assert actual is not None and actual.step == (2 if damage == "copied" else 1)


# ---- kills and faults -----------------------------------------------------------------------------------------

KILLED = """
import json, os, signal, sys
import torch
from tpshard.train.checkpoints import checkpoint, store_path
from tpshard.train.checkpoints.shards import Shard
from tpshard.train.checkpoints.store_path import StorePath

def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)

phase, place = sys.argv[1], StorePath(sys.argv[2])
store_path.PART = 5 << 20
system = store_path._file_system("s3")
real = system.call_s3
def call(method, *args, **kwargs):
    if phase == "between parts" and method == "upload_part" and kwargs["PartNumber"] == 2: die()
    if phase == "before the last part counts" and method == "complete_multipart_upload": die()
    return real(method, *args, **kwargs)
system.call_s3 = call
pipe = system.pipe_file
def put(path, *args, **kwargs):
    if phase == "before the manifest" and path.endswith("manifest.json"): die()
    pipe(path, *args, **kwargs)
    if phase == "after the manifest" and path.endswith("manifest.json"): die()
system.pipe_file = put
checkpoint.save(place, 3, {"w": Shard.whole(torch.full((3_300_000,), 3.0))}, {})
"""
KILLS = {
    "between parts": 2, "before the last part counts": 2, "before the manifest": 2, "after the manifest": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def killed(store: LocalStore) -> dict[str, tuple[StorePath, int]]:
    """By phase: the place in which a save was killed there, and how the process ended."""
    places = {phase: StorePath(f"s3://{BUCKET}/killed-{number}") for number, phase in enumerate(KILLS)}
    ended = {}
    for phase, where in places.items():
        for earlier in (1, 2):
            save(where, earlier, {"w": Shard.whole(torch.full((10,), float(earlier)))}, {})
        ended[phase] = (where, python(KILLED, phase, str(where)).returncode)
    return ended


@pytest.mark.parametrize("phase", KILLS)
def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before_it_and_no_waste(
    phase: str, killed: dict[str, tuple[StorePath, int]]
) -> None:
    where, code = killed[phase]
    assert code == -signal.SIGKILL
    last = KILLS[phase]
    assert list(steps(where))[-1] == last, "also before anything is cleaned"
    clean(where)  # as the next start does
    actual = newest(where)
    assert actual is not None and actual.step == last and actual.tensor("w")[0] == float(last)
    assert {name.partition("/")[0] for name in where.files()} == {f"step-{step:06d}" for step in range(1, last + 1)}
    assert where.clear_uploads() == 0, "nothing that would be paid for stays"


def test_a_store_that_fails_in_the_middle_of_a_save_costs_only_that_save(place: StorePath, store: LocalStore) -> None:
    save_on(2, place, 1, lambda rank: shards(model(1), 2, 1, rank))
    store.fails = lambda method, path: method == "PUT" and "step-000002/rank-00001" in path
    results = save_on(2, place, 2, lambda rank: shards(model(2), 2, 1, rank), keep_last=1)
    assert all(isinstance(result, SaveFailed) for result in results), results
    assert list(steps(place)) == [1] and not any("step-000002" in name for name in place.files())
    store.fails = lambda method, path: False
    save_on(2, place, 3, lambda rank: shards(model(3), 2, 1, rank), keep_last=1)
    assert_holds(newest(place) or pytest.fail("none"), model(3))


def test_a_store_that_does_not_answer_says_nothing_of_a_checkpoint(place: StorePath, store: LocalStore) -> None:
    """It is not passed over for an older one, which would then be continued."""
    for step in (1, 2):
        save(place, step, shards(model(step), 1, 1, 0), {})
    store.fails = lambda method, path: "step-000002/" in path and method in ("GET", "HEAD")
    with pytest.raises(StoreError):
        newest(place)


# ---- runs -----------------------------------------------------------------------------------------------------

RECIPE = """
name: mine
cluster: {device: cpu}
model: {preset: tiny, layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 48, seq_len: 64}
batch: {global_sequences: 4, per_device: 1}
compile: eager
train: {steps: 6}
schedule: {decay_steps: 6, warmup_steps: 1}
evaluate: {every_steps: 0}
checkpoint: {every_steps: 2}
logging: {every_steps: 1, wandb: null}
"""


def train(context: Context, environment: dict[str, str], folder: str, *overrides: str) -> str:
    """Trains or resumes, each rank in a working directory of its own as on a host of its own; returns the mistakes'
    messages, or the exit code."""
    enter(environment)
    own = Path(folder) / f"host-{context.rank}"
    own.mkdir(parents=True, exist_ok=True)
    before = os.getcwd()
    os.chdir(own)
    try:
        recipe = loads(RECIPE, overrides)
        return str(int(train_recipe(context, recipe).exit))
    except Mistakes as mistakes:
        return f"{int(mistakes.exit)}\n{mistakes}"
    finally:
        os.chdir(before)


def tensors_of(checkpoint: SavedCheckpoint | None) -> dict[str, torch.Tensor]:
    assert checkpoint is not None
    return {name: checkpoint.tensor(name) for name in checkpoint.tensors}


def losses(text: str) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in map(json.loads, text.splitlines()) if "loss" in row}


def test_hosts_without_a_shared_disk_train_resume_elsewhere_and_agree_bit_by_bit(
    pool: Any, store: LocalStore, place: StorePath, tmp_path: Path
) -> None:
    """With a run that was never stopped, in a folder."""
    at = {"mesh": {"fsdp": 2}, "world": 2}
    mesh = "mesh.fsdp=2"
    whole = tmp_path / "whole"
    assert pool.run(train, {}, str(tmp_path / "w"), mesh, f"run.dir={whole}", **at) == ["0", "0"]
    run_dir, environment = f"run.dir={place}", store.environment
    begin = pool.run(train, environment, str(tmp_path / "a"), mesh, run_dir, "train.steps=4", **at)
    resumed = pool.run(train, environment, str(tmp_path / "b"), mesh, run_dir, **at)  # other, empty folders
    assert begin == resumed == ["0", "0"]
    expected, actual = tensors_of(newest(whole / "checkpoints")), tensors_of(newest(place / "checkpoints"))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    recorded = losses((place / "metrics.jsonl").read_text())
    assert recorded == losses((whole / "metrics.jsonl").read_text()) and list(recorded) == [1, 2, 3, 4, 5, 6]
    # ... and on another mesh it goes on from the same values
    more = pool.run(
        train, environment, str(tmp_path / "c"), "mesh.fsdp=1", "mesh.tp=2", run_dir, "train.steps=7",
        mesh={"fsdp": 1, "tp": 2}, world=2,
    )  # fmt: skip
    assert more == ["0", "0"] and list(losses((place / "metrics.jsonl").read_text())) == [1, 2, 3, 4, 5, 6, 7]
    assert not (place / "lock.json").is_file()
    _nothing_secret(place, tmp_path)
    _commands_read_it(store, place, tmp_path)


def _nothing_secret(place: StorePath, folder: Path) -> None:
    """No file of the runs holds a credential."""
    texts = {name: (place / name).read_bytes() for name in place.files()}
    texts |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(texts) > 10
    for secret in SECRETS.values():
        assert [name for name, text in texts.items() if secret.encode() in text] == []


def _commands_read_it(store: LocalStore, place: StorePath, folder: Path) -> None:
    """`convert` reads the run, one of its checkpoints, and a recipe whose run is there."""
    (folder / "recipe.yaml").write_text(f"{RECIPE}run: {{dir: '{place}'}}\n")
    sources = [str(place), f"{place}/checkpoints/step-000007", str(folder / "recipe.yaml")]
    outs = [folder / f"hf-{number}" for number in range(3)]
    assert [run(["convert", source, str(out)]) for source, out in zip(sources, outs)] == [0, 0, 0]
    assert len({(out / "model.safetensors").read_bytes() for out in outs}) == 1
    assert all((out / "tokenizer.json").is_file() for out in outs)
    assert run(["serve", str(place), "--check", "serve.mesh.tp=1"]) == 0


def test_a_save_that_fails_is_a_warning_and_the_last_one_the_exit_code(
    pool: Any, store: LocalStore, place: StorePath, tmp_path: Path
) -> None:
    store.fails = lambda method, path: method == "PUT" and "step-000002/" in path
    arguments = (store.environment, str(tmp_path), f"run.dir={place}")
    assert pool.run(train, *arguments, "train.steps=4", world=1) == ["0"]
    assert list(steps(place / "checkpoints")) == [4], "the run went on"
    store.fails = lambda method, path: method == "PUT" and "step-000006/manifest" in path
    assert pool.run(train, *arguments, world=1) == [str(int(Exit.CHECKPOINT))]
    assert list(steps(place / "checkpoints")) == [4]
    store.fails = lambda method, path: False
    stopped = pool.run(train, *arguments, "optimizer.lr=1", world=1)[0]
    assert stopped.startswith("7") and f"{place} cannot be resumed" in stopped
    assert pool.run(train, *arguments, world=1) == ["0"] and list(steps(place / "checkpoints")) == [4, 6]


def test_of_two_records_the_later_one_is_the_runs(place: StorePath, tmp_path: Path) -> None:
    def row(time: int) -> bytes:
        return json.dumps({"step": time, "time": time}).encode() + b"\n"

    (place / "metrics.jsonl").write_bytes(row(1) + row(2))
    (place / "checkpoints" / "step-000001" / "manifest.json").write_bytes(b"{}")
    here = RunStore(place, tmp_path)
    here.pull()
    assert (tmp_path / "metrics.jsonl").read_bytes() == row(1) + row(2) and not (tmp_path / "checkpoints").exists()
    (tmp_path / "metrics.jsonl").write_bytes(row(1) + row(2) + row(3))  # a run that was killed before it copied it
    RunStore(place, tmp_path).pull()
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(row(3))
    (place / "metrics.jsonl").write_bytes(row(1) + row(2) + row(4))  # meanwhile another host went on
    RunStore(place, tmp_path).pull()
    assert (tmp_path / "metrics.jsonl").read_bytes() == row(1) + row(2) + row(4)


# ---- the lock -------------------------------------------------------------------------------------------------


def plant(lock: StorePath, **changes: object) -> dict[str, Any]:
    content = {**vars(Holder.this()), "token": "another", "beats": 1, **changes}
    lock.write_bytes(json.dumps(content).encode())
    return content


def test_a_copied_run_goes_on_where_it_is_named(
    place: StorePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPSHARD_CACHE", str(tmp_path / "cache"))
    text = b"name: mine\nmodel: {preset: tiny}\nrun: {dir: s3://elsewhere/mine}\n"
    (place / "recipe.yaml").write_bytes(text)
    assert load_checked(str(place))[0].run.store == str(place)
    assert load_checked(str(place), ["run.dir=s3://third/mine"])[0].run.store == "s3://third/mine"
    (place / "recipe.yaml").write_bytes(text.replace(b"s3://elsewhere", b"runs"))
    assert load_checked(str(place))[0].run.store == str(place)
    taken = tmp_path / "taken"
    (taken / "checkpoints").mkdir(parents=True)
    for name in ("plan.json", "metrics.jsonl"):
        (taken / name).touch()
    (taken / "recipe.yaml").write_bytes(text)
    assert load_checked(str(taken))[0].run.folder == taken


def test_one_run_at_a_time_and_the_dead_hold_nothing(place: StorePath) -> None:
    lock = place / "lock.json"
    held = StoreLock(lock)
    with pytest.raises(Taken) as taken:
        StoreLock(lock)
    assert f"process {os.getpid()}" in taken.value.why
    held.close()
    assert not lock.is_file()
    plant(lock, started="another boot:17")  # this machine's, but no process of now
    StoreLock(lock, wait=lambda seconds: pytest.fail("its end is known here")).close()


def test_a_store_without_conditions_refuses_a_second_run_too(place: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    write = StorePath.write_bytes
    monkeypatch.setattr(StorePath, "write_bytes", lambda self, data, *, new=False: write(self, data))
    held = StoreLock(place / "lock.json")
    with pytest.raises(Taken):
        StoreLock(place / "lock.json")
    held.close()


def test_a_lock_of_another_host_is_taken_once_it_stands_still(place: StorePath) -> None:
    lock, waits, said = place / "lock.json", list[float](), list[str]()
    content = plant(lock, host="elsewhere")

    def beats(seconds: float) -> None:
        content["beats"] += 1
        lock.write_bytes(json.dumps(content).encode())

    with pytest.raises(Taken, match="on elsewhere"):
        StoreLock(lock, wait=beats)
    taken = StoreLock(lock, wait=waits.append, say=said.append)
    assert sum(waits) == store_lock.PATIENCE_S > 2 * store_lock.BEAT_S and "elsewhere" in said[0]
    taken.check()
    plant(lock)  # and whose lock was taken while it stood still publishes nothing
    with pytest.raises(SaveFailed, match="another run has taken"):
        save(place, 1, shards(model(), 1, 1, 0), {}, guard=taken.check)
    assert steps(place) == {}
    taken.close()
    assert lock.is_file(), "the other's"


# ---- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3a://b/x", "s3://b/x"), ("az://b/x", "a folder"), ("S3://b/x", "s3://b/x"), ("s3:/b/x", "s3://b/x"),
        ("s3://", "s3://BUCKET/PREFIX"), ("s3://b//x", "PREFIX"), ("s3://b/../x", "PREFIX"),
        ("s3://key:secret@b/x", "environment"), ("https://b.s3.amazonaws.com/x", "s3://BUCKET"),
    ],
)  # fmt: skip
def test_a_place_that_is_none_is_told_without_its_secrets(
    url: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in (wrong_store(url) or pytest.fail(url))[1]
    for command in (["validate", "quickstart", f"run.dir={url}"], ["evaluate", url], ["convert", url, "out"]):
        assert run(command) in (Exit.USAGE, Exit.RECIPE)
        told = capsys.readouterr().err
        assert words in told and "secret" not in told


def test_what_keeps_a_store_from_being_reached_is_told_before_workers_start(
    store: LocalStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(place: str = f"s3://{BUCKET}/x", code: Exit = Exit.MACHINE) -> str:
        assert run(["train", "quickstart", f"run.dir={place}"]) == code
        return capsys.readouterr().err

    assert "there is no bucket nowhere-to-be-found" in told("s3://nowhere-to-be-found/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert "check the network" in told()
    for name in SECRETS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    assert "AWS_ACCESS_KEY_ID" in told()
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert "pip install 'tpshard[stores]'" in told()


def test_what_a_command_cannot_do_in_a_store_is_refused(
    place: StorePath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*command: str) -> tuple[int, str]:
        return run(list(command)), capsys.readouterr().err

    for key in ("data.source", "data.tokenizer", "model.hf"):
        code, text = told("validate", "quickstart", f"{key}={place}")
        assert code == Exit.RECIPE and f"`{key}` is not on this machine" in text and "copy it to a folder" in text
    (place / "config.json").write_bytes(b"{}")
    code, text = told("serve", f"{place}")
    assert code == Exit.CHECKPOINT and "copy the folder to this host" in text
    code, text = told("convert", str(place), f"{place}/out")
    assert code == Exit.USAGE and "is not on this machine" in text and not Path("s3:").exists()
    code, text = told("convert", f"{place}/checkpoints/step-000009", str(tmp_path / "out"))
    assert code == Exit.CHECKPOINT and "there is no checkpoint" in text
