"""Held-out text, progress display and summary of a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import until
from tpshard.diagnostics.diagnostic import Exit
from tpshard.parallelism.program import info
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor, describe
from tpshard.parallelism.runtime.outstanding import Outstanding
from tpshard.parallelism.runtime.watchdog import Doing, Watchdog
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads
from tpshard.train.data.corpus import open_text
from tpshard.train.data.tokens import load_tokenizer
from tpshard.train.records.progress import Lines, duration, short
from tpshard.train.run.outcome import Course, Outcome, ending
from tpshard.train.run.run_data import held_out

RECIPE = """
name: around
cluster: {device: cpu}
model: {preset: tiny, layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 16, vocab: 2048, seq_len: 32}
batch: {global_sequences: 12, per_device: 2}
evaluate: {sequences: 7}
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_held_out_sequences_are_the_same_on_every_mesh(ranks: int) -> None:
    setting = Setting.of(loads(RECIPE + f"mesh: {{fsdp: {ranks}}}"))
    corpus = open_text("sample")
    assert corpus.tokenizer is not None
    tokenizer = load_tokenizer(corpus.tokenizer)
    text = (corpus.held_out, tokenizer)
    parts = [list(held_out(setting, rank, text)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1, "every rank runs as many batches, or they would wait for ever"
    shapes = {tuple(batch["tokens"].shape) for part in parts for batch in part}
    assert shapes == {(2, 32)}
    rows = torch.cat([batch["tokens"][(batch["targets"] >= 0).any(-1)] for part in parts for batch in part])
    one = Setting.of(loads(RECIPE))
    alone = torch.cat([b["tokens"][(b["targets"] >= 0).any(-1)] for b in held_out(one, 0, text)])
    assert len(alone) == 7 and torch.equal(rows, alone)


def stall(context: Context, said_so: str) -> tuple[str, str]:
    """Rank 1 comes when rank 0's watchdog has spoken: what does it say?"""
    setting = Setting.of(loads(RECIPE + "mesh: {fsdp: 2}"))
    program = training.build(setting).micro
    executor = Executor(program, context)
    inputs = [torch.zeros(port.local, dtype=port.dtype) for port in program.inputs]
    executor(*inputs)  # now the first collective comes at once
    output: list[str] = []

    def speak(text: str) -> None:
        output.append(text)
        Path(said_so).touch()

    watchdog = Watchdog(context.rank, 2.0, on_stall=speak)
    context.watchdog = watchdog
    watchdog.describe = describe
    if context.rank == 1:
        until(Path(said_so).exists, "the watchdog's word")
    else:
        watchdog.beat(7)
        watchdog.start()
    executor(*inputs)
    watchdog.close()
    return "".join(output), str(watchdog.describe(watchdog.doing))


def test_the_watchdog_names_the_collective_and_the_module_it_belongs_to(pool: Any, tmp_path: Path) -> None:
    (output, after), _ = pool.run(stall, str(tmp_path / "said"), world=2, mesh={"dp": 1, "fsdp": 2, "tp": 1})
    expected = "rank 0 made no progress for 2 s in step 7, in all_gather over fsdp (tok_embed.weight)"
    assert output.startswith(expected), output
    assert after == str(Doing("computing"))


class Mark:
    """An event of a device that has come past the first `reached` marks."""

    reached = 0

    def __init__(self) -> None:
        self.number = -1

    def record(self) -> None:
        self.number = max((mark.number for mark in MARKS), default=-1) + 1
        MARKS.append(self)

    def query(self) -> bool:
        return self.number < Mark.reached


MARKS: list[Mark] = []


def test_the_watchdog_names_the_wait_that_a_device_does_not_come_past() -> None:
    """The host of a device issues a whole step and hangs nowhere."""
    program = training.build(Setting.of(loads(RECIPE + "mesh: {fsdp: 2}"))).micro
    watchdog = Watchdog(0, 2.0)
    watchdog.describe, watchdog.outstanding = describe, Outstanding(Mark)
    waits = [node for node in program.graph.nodes if info(node).comm is not None][:3]
    assert str(watchdog.doing_now()) == "starting up"
    for node in waits:
        watchdog.outstanding.add(node)
    for Mark.reached, node in enumerate(waits):
        assert watchdog.doing_now() == describe(node) and watchdog.doing_now().waiting
        assert watchdog.outstanding.over == Mark.reached
    Mark.reached = 3
    assert str(watchdog.doing_now()) == "starting up"


def test_the_watchdog_ends_a_host_whose_device_has_failed() -> None:
    class Failed:
        def record(self) -> None: ...

        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")

    output: list[str] = []
    watchdog = Watchdog(3, 0.05, on_stall=output.append)
    watchdog.outstanding, watchdog.doing = Outstanding(Failed), Doing("waiting for the other workers")
    watchdog.outstanding._waits.append((Failed(), "all_reduce"))
    watchdog.start()
    until(lambda: bool(output))
    assert output[0].endswith(
        "in waiting for the other workers, while its device has failed: "
        "CUDA error: an illegal memory access was encountered"
    )


def test_plain_lines_show_logged_steps_and_survive_a_closed_stream() -> None:
    stream = io.StringIO()
    lines = Lines(20, stream)
    row = {"loss": 2.5, "tokens_per_s": 12345.6}
    lines.step({**row, "step": 1}, logged=True)
    lines.step({**row, "step": 2}, logged=False)
    lines.step({**row, "loss": None, "step": 10}, logged=True)
    lines.step({**row, "loss": None, "tokens_per_s": 0.0, "step": 11}, logged=True)
    shown = stream.getvalue().splitlines()
    assert shown[0] == "step 1/20  loss 2.5000  12.3k tokens/s"
    assert shown[1].startswith("step 10/20  loss not finite  12.3k tokens/s") and shown[1].endswith("left")
    assert "step 11/20  no target" in shown[2]
    assert "\x1b" not in stream.getvalue()
    stream.close()
    lines.note("nobody reads this")


def test_numbers_for_people() -> None:
    assert [short(n) for n in (7, 999, 12345, 3.2e6, 1.5e9)] == ["7", "999", "12.3k", "3.2M", "1.5G"]
    assert [duration(s) for s in (0.4, 75, 3725)] == ["0:00", "1:15", "1:02:05"]


def test_the_end_names_what_to_do_next() -> None:
    setting = Setting.of(loads(RECIPE + "run: {dir: runs/x}"))
    saved = Path("runs/x/checkpoints/step-000010")
    done = Outcome(Exit.DONE, Course(10, 10, 1234), 8.0, 5.5, 5.6, 61, 2000.0, 0, saved)
    text = ending(done, setting)
    for part in ("8.0000 -> 5.5000", "held-out loss 5.6000", "1:01", "tpshard serve runs/x", "metrics.jsonl"):
        assert part in text
    stopped = Outcome(Exit.PREEMPTED, Course(3, 3, 99), 8.0, 7.0)
    assert "stopped, as asked, after step 3" in ending(stopped, setting)
    assert "tpshard train runs/x" in ending(stopped, setting)


def test_a_module_of_ones_own_is_not_sent_to_what_refuses_it() -> None:
    setting = Setting.of(loads("{model: {module: 'own:Net', seq_len: 8}, run: {dir: runs/x}}"))
    text = ending(Outcome(Exit.DONE, Course(10, 10, 1234), 8.0, 5.5), setting)
    assert "tpshard plan runs/x" in text and "tpshard train runs/x" in text
    assert "tpshard serve runs/x" in text and "tpshard convert" not in text
