"""Any block of a checkpoint can be read, and a fault while saving never damages earlier checkpoints."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import python
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from safetensors.torch import load_file
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.train.checkpoints import checkpoint
from tpshard.train.checkpoints.checkpoint import OPTIMIZER, SaveFailed, check_cover, clean, save, steps
from tpshard.train.checkpoints.restore import SavedCheckpoint, newest, open_checkpoint
from tpshard.train.checkpoints.shards import DTYPES, Shard, write_safetensors


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Global tensors of odd sizes, in several dtypes; one scalar, one empty."""
    random_ = torch.Generator().manual_seed(seed)
    return {
        "tok_embed.weight": torch.randn(10, 6, generator=random_),
        "layers.0.mlp.up.weight": torch.randn(7, 5, generator=random_).bfloat16(),
        "norm.weight": torch.randn(5, generator=random_),
        "empty": torch.empty(0, 3),
        f"{OPTIMIZER}exp_avg/norm.weight": torch.randn(5, generator=random_),
        f"{OPTIMIZER}step": torch.tensor(3 + seed),
    }


def shards(tensors: Mapping[str, torch.Tensor], fsdp: int, tp: int, rank: int) -> dict[str, Shard]:
    """fsdp x tp: dim 0 over fsdp (unevenly: the last ranks may hold nothing), dim 1 over tp; scalars on all."""
    f, t = divmod(rank, tp)
    blocks = {}
    for name, tensor in tensors.items():
        starts, stops = [], []
        for size, index, count in zip(tensor.shape, (f, t), (fsdp, tp)):
            step = -(-size // count)
            starts.append(min(index * step, size))
            stops.append(min((index + 1) * step, size))
        block = tensor[tuple(slice(a, b) for a, b in zip(starts, stops))]
        blocks[name] = Shard(block, tuple(tensor.shape), tuple(starts))
    return blocks


class Gathering:
    """Gathers JSON among threads, as `Context.gather_beside` does among processes."""

    def __init__(self, world: int):
        self.barrier = threading.Barrier(world, timeout=PATIENCE)
        self.values: list[str] = [""] * world

    def __call__(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = json.dumps(value)
        self.barrier.wait()
        everyone = [json.loads(text) for text in self.values]
        self.barrier.wait()
        return everyone


def save_on(
    world: int, directory: Path, step: int, parts: Callable[[int], Mapping[str, Shard]], **options: Any
) -> list[Path | BaseException]:
    """`save` on `world` ranks that are threads here; each rank's result or error."""
    gather = Gathering(world)
    results: list[Path | BaseException] = [RuntimeError("did not end")] * world

    def run(rank: int) -> None:
        try:
            results[rank] = save(
                directory, step, parts(rank), {"course": {"step": step}},
                rank=rank, world=world, gather=lambda value: gather(rank, value), **options,
            )  # fmt: skip
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def save_one(directory: Path, step: int, **options: Any) -> Path:
    return save(directory, step, shards(model(step), 1, 1, 0), {"course": {"step": step}}, **options)


def assert_holds(checkpoint: SavedCheckpoint, tensors: Mapping[str, torch.Tensor]) -> None:
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        read = checkpoint.tensor(name)
        assert read.dtype == tensor.dtype and torch.equal(read, tensor), name


# ---- layouts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fsdp", "tp"), [(1, 1), (2, 2), (3, 1), (1, 4), (8, 1), (2, 3)])
def test_a_checkpoint_of_any_mesh_loads_on_any_other(fsdp: int, tp: int, tmp_path: Path) -> None:
    tensors = model()
    results = save_on(fsdp * tp, tmp_path, 500, lambda rank: shards(tensors, fsdp, tp, rank))
    assert results == [tmp_path / "step-000500"] * (fsdp * tp)
    actual = open_checkpoint(tmp_path / "step-000500")
    assert_holds(actual, tensors)
    assert actual.step == 500 and actual.meta == {"course": {"step": 500}}
    for other_fsdp, other_tp in [(1, 1), (4, 1), (1, 2), (3, 2)]:
        for rank in range(other_fsdp * other_tp):
            for name, shard in shards(tensors, other_fsdp, other_tp, rank).items():
                block = actual.block(name, shard.starts, shard.tensor.shape)
                assert torch.equal(block, shard.tensor), (name, rank)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.randoms(use_true_random=False))
def test_any_block_is_what_slicing_gives(rows: int, columns: int, chance: random.Random) -> None:
    tensor = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    fsdp, tp = chance.randint(1, 3), chance.randint(1, 3)
    with TemporaryFolder() as folder:
        save_on(fsdp * tp, folder, 1, lambda rank: shards({"w": tensor}, fsdp, tp, rank))
        actual = SavedCheckpoint(folder / "step-000001")
        a, b = sorted(chance.choices(range(rows + 1), k=2))
        c, d = sorted(chance.choices(range(columns + 1), k=2))
        assert torch.equal(actual.block("w", (a, c), (b - a, d - c)), tensor[a:b, c:d])


class TemporaryFolder:
    def __enter__(self) -> Path:
        import tempfile

        self.path = Path(tempfile.mkdtemp())
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path)


def test_what_several_ranks_hold_is_written_once_and_by_different_ranks(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((100,), float(i)) for i in range(32)}
    save_on(4, tmp_path, 1, lambda rank: {name: Shard.whole(t) for name, t in tensors.items()})
    files = list((tmp_path / "step-000001").glob("*.safetensors"))
    written = [name for path in files for name in load_file(path)]
    assert sorted(written) == sorted(tensors), "each block once"
    assert len(files) == 4 and max(len(load_file(path)) for path in files) < 20


def test_the_model_comes_with_its_optimizer(tmp_path: Path) -> None:
    stored = open_checkpoint(save_one(tmp_path, 2))
    assert set(stored.tensors) == set(model())
    assert all(torch.equal(stored.tensor(name), tensor) for name, tensor in model(2).items())


def test_files_are_plain_safetensors_in_every_dtype(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.zeros(3, 2).to(dtype) for dtype in DTYPES} | {"view": torch.arange(6.0)[::2]}
    size, _ = write_safetensors(tmp_path / "t.safetensors", tensors)
    assert size == (tmp_path / "t.safetensors").stat().st_size
    read = load_file(tmp_path / "t.safetensors")
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name].double(), tensor.double()), name


def test_nothing_in_a_checkpoint_is_pickled(tmp_path: Path) -> None:
    folder = save_one(tmp_path, 1)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    sources = [Path(m.__file__ or "").read_text() for m in (checkpoint, sys.modules[SavedCheckpoint.__module__])]
    assert not any("torch.load" in source or "import pickle" in source for source in sources)


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        ([([0], [2])], "hold 2 of its 4"),
        ([([0], [3]), ([2], [1])], "overlap"),
        ([([0], [2]), ([0], [2])], "overlap"),
        ([([0], [2]), ([3], [2])], "outside"),
    ],
)
def test_blocks_that_do_not_make_up_a_tensor(blocks: list[tuple[list[int], list[int]]], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_cover("w", [4], blocks)


def test_blocks_that_are_no_grid_but_fit() -> None:
    check_cover("w", [2, 4], [([0, 0], [1, 3]), ([0, 3], [1, 1]), ([1, 0], [1, 1]), ([1, 1], [1, 3])])


def test_ranks_that_contradict_each_other_save_nothing(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    results = save_on(2, tmp_path, 2, lambda rank: {"w": Shard.whole(torch.zeros(3 + rank))})
    assert isinstance(results[0], ValueError) and isinstance(results[1], SaveFailed)
    assert list(steps(tmp_path)) == [1] and newest(tmp_path) is not None
    assert not list(tmp_path.glob(".step*"))


# ---- keeping --------------------------------------------------------------------------------------------------


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save_one(tmp_path, step, keep_last=2)
    assert list(steps(tmp_path)) == [30, 40]
    assert sorted(os.listdir(tmp_path)) == ["step-000030", "step-000040"]


def test_one_that_is_read_stays_until_it_is_not(tmp_path: Path) -> None:
    save_one(tmp_path, 10, keep_last=1)
    opened = open_checkpoint(tmp_path / "step-000010")
    save_one(tmp_path, 20, keep_last=1)
    name = next(iter(opened.tensors))
    assert list(steps(tmp_path)) == [10, 20] and opened.tensor(name).shape == opened.tensors[name].shape
    del opened
    save_one(tmp_path, 30, keep_last=1)
    assert list(steps(tmp_path)) == [30]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_one(tmp_path, 7)
    save(tmp_path, 7, shards(model(99), 1, 1, 0), {})
    assert_holds(open_checkpoint(tmp_path / "step-000007"), model(99))
    assert os.listdir(tmp_path) == ["step-000007"]


def test_checkpoints_of_a_course_that_was_left_are_neither_resumed_from_nor_lost(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_one(tmp_path, step, keep_last=3)
    save_one(tmp_path, 15, keep_last=1)  # after going back to 10
    actual = newest(tmp_path)
    assert actual is not None and actual.step == 15
    assert sorted(os.listdir(tmp_path)) == ["step-000015", "superseded-step-000020", "superseded-step-000030"]


# ---- faults while saving --------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from tpshard.train.checkpoints import checkpoint
from tpshard.train.checkpoints.shards import Shard

def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)

def save_and_die(phase, directory, step):
    phases = iter(["attempt", "blocks", "shard", "end"])
    def gather(value):
        if next(phases, None) == phase: die()
        return [value]
    def half(path, tensors):
        path.write_bytes(b"half of it")
        die()
    real_rename = Path.rename
    def rename(self, target):
        target = Path(target)
        if phase == "rename" and target.name.startswith("step-"): die()
        result = real_rename(self, target)
        if phase == "between renames" and target.name.endswith(".replaced"): die()
        if phase == "within removal" and target.name.endswith(".deleted"): die()
        return result
    Path.rename = rename
    if phase == "within the shard": checkpoint.write_safetensors = half
    tensors = {"w": Shard.whole(torch.full((1000,), float(step)))}
    checkpoint.save(directory, step, tensors, {}, gather=gather, keep_last=2)

for argument in sys.argv[1:]:
    phase, directory, step = argument.split("|")
    if (child := os.fork()) == 0:
        save_and_die(phase, Path(directory), int(step))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

PHASES = {
    "attempt": (3, [1, 2]),
    "blocks": (3, [1, 2]),
    "shard": (3, [1, 2]),
    "within the shard": (3, [1, 2]),
    "end": (3, [1, 2, 3]),
    "rename": (3, [1, 2]),
    "between renames": (2, [1, 2]),
    "within removal": (3, [2, 3]),
}
"""Where the save is killed: (the step it saves, the steps that must be there afterwards); 1 and 2 were saved before."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """By phase: the folder in which a save was killed there, and how the process ended."""
    folders = {phase: tmp_path_factory.mktemp("killed") for phase in PHASES}
    for folder in folders.values():
        for earlier in (1, 2):
            save(folder, earlier, {"w": Shard.whole(torch.full((1000,), float(earlier)))}, {})
    arguments = [f"{phase}|{folder}|{PHASES[phase][0]}" for phase, folder in folders.items()]
    process = python(KILLED, *arguments)
    assert process.returncode == 0, process.stderr
    return {phase: (folders[phase], int(code)) for phase, code in zip(PHASES, process.stdout.split(), strict=True)}


@pytest.mark.parametrize("phase", PHASES)
def test_killed_at_any_phase_of_a_save_the_checkpoint_before_it_loads(
    phase: str, killed: dict[str, tuple[Path, int]]
) -> None:
    folder, code = killed[phase]
    assert code == -signal.SIGKILL
    survivors = PHASES[phase][1]
    clean(folder)  # as the next start does
    assert sorted(os.listdir(folder)) == [f"step-{n:06d}" for n in survivors], "nothing hidden is left"
    actual = newest(folder)
    assert actual is not None and actual.step == survivors[-1]
    assert torch.equal(actual.tensor("w"), torch.full((1000,), float(survivors[-1])))


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_whose_disk_is_full_fails_the_save_on_all_and_nothing_else(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_on(3, tmp_path, 1, lambda rank: shards(model(), 3, 1, rank))
    real = checkpoint.write_safetensors

    def full(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
        if path.name.startswith(f"rank-{victim:05d}"):
            path.write_bytes(b"as much as fits")
            raise OSError(28, "No space left on device")
        return real(path, tensors)

    monkeypatch.setattr(checkpoint, "write_safetensors", full)
    results = save_on(3, tmp_path, 2, lambda rank: shards(model(1), 3, 1, rank), keep_last=1)
    assert all(isinstance(result, SaveFailed) for result in results), results
    assert "No space left" in str(results[victim])
    assert os.listdir(tmp_path) == ["step-000001"], "the old one is kept, and what was begun gives its room back"
    monkeypatch.undo()
    assert isinstance(save_on(3, tmp_path, 3, lambda rank: shards(model(1), 3, 1, rank))[0], Path)


def test_a_real_limit_on_file_sizes(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    big = {"w": Shard.whole(torch.zeros(100_000))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(SaveFailed, match="step 2"):
            save(tmp_path, 2, big, {}, keep_last=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path) == ["step-000001"]
    assert_holds(open_checkpoint(tmp_path / "step-000001"), model(1))


def test_a_folder_that_cannot_be_written_fails_on_all_ranks_alike(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    results = save_on(2, tmp_path / "file" / "checkpoints", 1, lambda rank: shards(model(), 2, 1, rank))
    assert all(isinstance(result, SaveFailed) for result in results), results


# ---- faults afterwards ----------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)


def edit(path: Path) -> None:
    manifest = json.loads(path.read_text())
    manifest["meta"]["course"]["step"] = 10_000
    path.write_text(json.dumps(manifest))


def swap(folder: Path) -> None:
    a, b = folder / "rank-00000.safetensors", folder / "rank-00001.safetensors"
    data = a.read_bytes(), b.read_bytes()
    b.write_bytes(data[0])
    a.write_bytes(data[1])


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a flipped bit": ("rank-00001.safetensors", lambda f: flip(f / "rank-00001.safetensors")),
    "a file cut short": ("rank-00000.safetensors", lambda f: os.truncate(f / "rank-00000.safetensors", 100)),
    "a missing file": ("rank-00001.safetensors", lambda f: (f / "rank-00001.safetensors").unlink()),
    "swapped files": ("rank-00000.safetensors", swap),
    "an edited manifest": ("manifest.json", lambda f: edit(f / "manifest.json")),
    "a manifest cut short": ("manifest.json", lambda f: os.truncate(f / "manifest.json", 200)),
    "no manifest": ("manifest.json", lambda f: (f / "manifest.json").unlink()),
    "a manifest of a list": ("manifest.json", lambda f: (f / "manifest.json").write_text("[1]") and None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_taken(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, break_it = DAMAGE[damage]
    for step in (1, 2):
        save_on(2, tmp_path, step, lambda rank, step=step: shards(model(step), 2, 1, rank))
    break_it(tmp_path / "step-000002")
    with pytest.raises(Mistakes) as caught:
        open_checkpoint(tmp_path / "step-000002")
    assert caught.value.exit == Exit.CHECKPOINT and file in str(caught.value)
    actual = newest(tmp_path)
    assert actual is not None and actual.step == 1
    assert_holds(actual, model(1))
    assert file in caplog.text and "falling back to step-000001" in caplog.text


def test_when_all_are_damaged_the_run_does_not_start_over_by_itself(tmp_path: Path) -> None:
    for step in (1, 2):
        flip(save_one(tmp_path, step) / "rank-00000.safetensors")
    with pytest.raises(Mistakes, match="every checkpoint") as caught:
        newest(tmp_path)
    assert caught.value.exit == Exit.CHECKPOINT
    assert newest(tmp_path / "nowhere") is None


def test_a_renamed_checkpoint_is_named_and_not_resumed_from(tmp_path: Path) -> None:
    save_one(tmp_path, 3)
    save_one(tmp_path, 5).rename(tmp_path / "step-000009")
    checkpoint = newest(tmp_path)
    assert checkpoint is not None and checkpoint.step == 3
    shutil.rmtree(tmp_path / "step-000003")
    with pytest.raises(Mistakes, match="step-000009 holds step 5: it was renamed from step-000005") as refused:
        newest(tmp_path)
    assert refused.value.exit == Exit.CHECKPOINT


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    folder = save_one(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    text = json.dumps(manifest).replace("rank-00000.safetensors", "../rank-00000.safetensors")
    manifest = json.loads(text)
    manifest["sha256"] = checkpoint.manifest_sum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Mistakes, match="not a file of its folder"):
        open_checkpoint(folder)


def test_a_checkpoint_of_another_model_is_told_apart_clearly(tmp_path: Path) -> None:
    actual = open_checkpoint(save_one(tmp_path, 1))
    expected = {name: (tuple(saved.shape), saved.dtype) for name, saved in actual.tensors.items()}
    actual.require(expected)
    expected["tok_embed.weight"] = ((12, 6), torch.float32)
    expected["norm.weight"] = ((5,), torch.bfloat16)
    expected["layers.1.mlp.up.weight"] = expected.pop("layers.0.mlp.up.weight")
    with pytest.raises(Mistakes) as caught:
        actual.require(expected)
    assert caught.value.exit == Exit.CHECKPOINT
    for words in (
        "tok_embed.weight: saved [10, 6], expected [12, 6]", "norm.weight: saved float32, expected bfloat16",
        "not in the checkpoint: layers.1.mlp.up.weight", "in the checkpoint only: layers.0.mlp.up.weight",
    ):  # fmt: skip
        assert words in str(caught.value)


def test_shards_are_checked_when_they_are_made() -> None:
    for tensor, shape, starts in ((torch.zeros(2), (3,), (2,)), (torch.zeros(2), (2, 2), (0, 0))):
        with pytest.raises(ValueError):
            Shard(tensor, shape, starts)
