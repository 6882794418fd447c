"""Training processes killed around saves: the newest checkpoint is that of a run which nobody stopped, bit by bit.

    python benchmarks/kills.py [--times 272] [--minutes N] [--seed 0] [--record] [--json]

A run of two processes saves every second step in the background. A rank, all ranks or the launcher is killed with
SIGKILL: at a random time, or while a save's draft is on the disk. After each kill the newest checkpoint must be whole,
equal in every tensor to the reference run's at its step, and no older than the last one whose save was noted; then the
same command resumes. A finished run is compared as well, and begun anew. Exits with 1 if a checkpoint was lost or
differed.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.train.checkpoints.checkpoint import steps
from tpshard.train.checkpoints.restore import SavedCheckpoint, newest, open_checkpoint
from tpshard.train.records.records import last_saved

from record import Record, parser_of
from running import COMMAND

VICTIMS = ("a rank", "all ranks", "the launcher", "launcher and ranks")
MOMENTS = ("any time", "during a save")
STEPS = 120
RECIPE = f"""
name: kills
cluster: {{device: cpu}}
mesh: {{fsdp: 2}}
model: {{preset: tiny, layers: 2, width: 128, heads: 4, kv_heads: 2, head_dim: 32, mlp: 256, seq_len: 64}}
batch: {{global_sequences: 4}}
compile: eager
train: {{steps: {STEPS}}}
evaluate: {{every_steps: 0}}
launch: {{restarts: 0}}
logging: {{every_steps: 10, wandb: null}}
"""

Sums = Mapping[str, str]
"""The sha256 of each tensor of a checkpoint."""


def sums_of(checkpoint: SavedCheckpoint) -> Sums:
    return {
        name: hashlib.sha256(checkpoint.tensor(name).contiguous().numpy().tobytes()).hexdigest()
        for name in checkpoint.tensors
    }


def start(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Starts or resumes the run in a folder, in a session of its own."""
    command = [*COMMAND, "train", str(folder.parent / "kills.yaml"), f"run.dir={folder}", "checkpoint.every_steps=2"]
    with (folder.parent / "output.txt").open("wb") as output:
        return subprocess.Popen([*command, *overrides], stdout=output, stderr=output, start_new_session=True)


def reference(folder: Path) -> dict[int, Sums]:
    """The sums of every checkpoint of a run that is not stopped."""
    process = start(folder, f"checkpoint.keep_last={STEPS}")
    if process.wait() != 0:
        sys.exit((folder.parent / "output.txt").read_text())
    return {step: sums_of(open_checkpoint(path)) for step, path in steps(folder / "checkpoints").items()}


def await_moment(process: subprocess.Popen[bytes], folder: Path, moment: str, chance: random.Random) -> None:
    """Returns at the moment to kill, once the run has saved since its start, or when it has ended."""
    before = last_saved(folder) or 0
    at_least = before + 2 * chance.randint(1, 20)
    while process.poll() is None and (last_saved(folder) or 0) < min(at_least, STEPS):
        time.sleep(0.002)
    drafts = folder / "checkpoints"
    if moment == "any time":
        time.sleep(chance.uniform(0, 0.1))
        return
    until = time.monotonic() + 5
    while process.poll() is None and time.monotonic() < until:
        if any(name.endswith((".tmp", ".replaced", ".deleted")) for name in os.listdir(drafts)):
            time.sleep(chance.choice((0, 0, chance.uniform(0, 0.01))))
            return


def kill(process: subprocess.Popen[bytes], victim: str, chance: random.Random) -> None:
    """Kills the chosen processes of a run, and waits until all of it have ended."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    chosen = {"a rank": family[:1] if chance.random() < 0.5 else family[-1:], "the launcher": []}.get(victim, family)
    if "launcher" in victim and process.poll() is None:
        process.send_signal(signal.SIGKILL)
    for one in chosen:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(family)


def verdict(folder: Path, expected: Mapping[int, Sums]) -> tuple[int, str]:
    """The step of the newest checkpoint after a kill, and what is wrong with it; "" for nothing."""
    noted = last_saved(folder) or 0
    try:
        checkpoint = newest(folder / "checkpoints")
    except Mistakes as mistakes:
        return 0, str(mistakes)
    if checkpoint is None or checkpoint.step < noted:
        return 0, f"step {noted} was saved and is gone"
    wrong = [name for name, total in sums_of(checkpoint).items() if expected[checkpoint.step].get(name) != total]
    return checkpoint.step, f"differs: {', '.join(wrong[:3])}" if wrong else ""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--times", type=int, default=272, help="kills")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begins no further kill after so many")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    record, chance = Record("kills", quiet=options.json), random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="tpshard-kills-") as name:
        (Path(name) / "kills.yaml").write_text(RECIPE)
        expected, folder = reference(Path(name) / "reference"), Path(name) / "run"
        until = time.monotonic() + 60 * options.minutes
        while len(record.rows) < options.times and time.monotonic() < until:
            victim, moment = chance.choice(VICTIMS), chance.choice(MOMENTS)
            process = start(folder)
            folder.mkdir(exist_ok=True)
            (folder / "checkpoints").mkdir(exist_ok=True)
            try:
                await_moment(process, folder, moment, chance)
                ended = process.poll()
            except KeyboardInterrupt:
                kill(process, "launcher and ranks", chance)
                raise
            kill(process, victim, chance)
            step, wrong = verdict(folder, expected)
            if ended is not None and ended != 0:
                wrong = wrong or f"ended by itself with {ended}: {(Path(name) / 'output.txt').read_text()[-300:]}"
            left = sorted(n for n in os.listdir(folder / "checkpoints") if n.startswith("."))
            row = {"victim": victim, "moment": moment, "step": step, "left": left, "wrong": wrong}
            if ended is None:
                record.rows.append(row)
                record.say(f"{len(record.rows):>4}  {victim:<18} {moment:<14} step {step:>4}  {wrong or 'whole'}")
            elif wrong:
                record.say(f"      {wrong}")
                record.rows.append(row)
            if step == STEPS or wrong:
                shutil.rmtree(folder, ignore_errors=True)
    kills = Counter((row["victim"], row["moment"]) for row in record.rows)
    for (victim, moment), count in sorted(kills.items()):
        record.figure(f"kills.{victim} {moment}".replace(" ", "-"), count, "kills")
    lost = [row for row in record.rows if row["wrong"]]
    record.figure("kills", len(record.rows), "kills")
    record.figure("in-a-save", sum(bool(row["left"]) for row in record.rows), "kills that left a save unfinished")
    record.figure("lost", len(lost), "checkpoints lost or changed")
    record.close(write=options.record, as_json=options.json)
    sys.exit(int(bool(lost)))


if __name__ == "__main__":
    main()
