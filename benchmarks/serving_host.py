"""Measures what HTTP takes of a server's host: CPU time of the server's own process per step of many streams.

    python benchmarks/serving_host.py [--streams 1,16,64] [--new 400] [--step 1.5] [--repeat 5]
        [--kind chat] [--logprobs 2]

The server's runner computes nothing: its step sleeps until `--step` milliseconds are over, as the host does while a GPU
computes, and answers with the tokens of a text. All else is the server: its engine, its event loop, its sockets. The
clients are one process beside it, which only counts bytes. CPU times are of threads, in user and system mode: `loop` is
the thread of the event loop and `engine` the engine's. `between` is the time between two tokens of one stream, and
`first` that to the first token, of medians of all streams. `gap` is the time from the end of a step to the begin of the
next, in which a GPU would wait, and `alone` that of an engine whose tokens nobody sends: what their difference is, a
process of its own for HTTP could save at most. All are per step; shown is the median of the repeats.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import MutableSequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.programs.scheduling.request import Event, Sampling, Sequence
from tpshard.serve.api.access import Access
from tpshard.serve.api.app import Server, make_app
from tpshard.serve.api.http import bind, run
from tpshard.serve.api.metrics import Metrics
from tpshard.serve.api.preprocess_pool import PreprocessPool, PreprocessSetup
from tpshard.serve.api.service import Limits, Service
from tpshard.serve.engine.picks import Picked, Picks
from tpshard.serve.engine.step import StepInput

from record import ROOT, Record, parser_of
from running import read_streams

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


Gaps = MutableSequence[float]
"""Seconds between steps, the newest in place of the oldest."""


class IdleRunner:
    """A runner that sleeps for each step, and says the tokens of a text one after another."""

    blocks, block_size, max_rows, max_logit_rows, max_seq, chunks, slots = 8192, 16, 512, 256, 2048, None, 0

    def __init__(self, text: list[int], vocab: int, step_s: float, gaps: Gaps) -> None:
        self.text, self.vocab, self.step_s = np.array(text, dtype=np.float64), vocab, step_s
        self.gaps, self.steps, self.ended = gaps, 0, 0.0

    def step(self, batch: StepInput, picks: Picks) -> Picked:
        began = time.perf_counter()
        self.gaps[self.steps % len(self.gaps)] = began - self.ended
        self.steps += 1
        table = np.zeros((len(batch.logit_rows), 3 + 2 * picks.most))
        table[:, 0] = 1
        table[:, 1] = self.text[batch.positions[batch.logit_rows] % len(self.text)]
        time.sleep(max(0.0, self.step_s - (time.perf_counter() - began)))
        self.ended = time.perf_counter()
        return Picked(table)

    def adapt(self, slot: int, folder: str) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


def write_tokenizer(folder: Path, text: str) -> None:
    """A byte-level BPE of 4000 tokens, trained on the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def serve(folder: Path, text: str, step_s: float, gaps: Gaps, ready: Connection) -> None:
    """The server, until it is terminated; tells its port and the numbers of its threads."""
    tokenizer = FolderTokenizer(folder)
    runner = IdleRunner(tokenizer.encode(text), tokenizer.size, step_s, gaps)
    service = Service(lambda: runner, Limits(running=256, queue=1024), Metrics())
    service.start()
    pool = PreprocessPool(PreprocessSetup(str(folder), None, tokenizer.chat_template, "text", {}))
    app = make_app(Server("text", service, tokenizer, pool), Access())
    sock = bind("127.0.0.1", 0)
    engine = next(thread.native_id for thread in threading.enumerate() if thread.name == "engine")
    try:
        run(app, service, sock, lambda: ready.send((sock.getsockname()[1], threading.get_native_id(), engine)))
    finally:
        pool.close()


def alone(streams: int, new: int, step_s: float) -> float:
    """Seconds between the steps of an engine whose tokens are dropped."""

    def drop(events: list[Event]) -> None:
        for event in events:
            if event.finish is not None:
                ended.release()

    runner, ended = IdleRunner([5, 6, 7], 1000, step_s, [0.0] * (new // 2)), threading.Semaphore(0)
    service = Service(lambda: runner, Limits(running=256), Metrics())
    service.start()
    sequences = [Sequence((1, 2, 3), Sampling(temperature=0), new) for _ in range(streams)]
    service.submit(sequences, drop)
    for _ in sequences:
        ended.acquire()
    service.close()
    return statistics.median(runner.gaps)


def ask(results: Connection, port: int, kind: str, new: int, logprobs: int | None) -> None:
    """Answers each number of streams with the times of a round, in a process of its own."""
    body: dict[str, Any] = {"model": "text", "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if kind == "chat" else {"prompt": "hi"}
    if logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs} if kind == "chat" else {"logprobs": logprobs}
    while True:
        reads = read_streams(f"http://127.0.0.1:{port}{ROUTES[kind]}", [body] * results.recv())
        if any(read.events < new // 2 for read in reads):  # tokens that are half of a character have none
            raise SystemExit("tokens came together: the clients are too slow to measure this")
        results.send([statistics.median(times) for times in zip(*((read.first_s, read.last_s) for read in reads))])


def ticks(process: int, thread: int) -> tuple[float, float]:
    """Seconds of user and system time of a thread."""
    words = Path(f"/proc/{process}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return tuple(int(word) / os.sysconf("SC_CLK_TCK") for word in words[11:13])  # type: ignore[return-value]


def measure(streams: int, new: int, process: int, threads: dict[str, int], clients: Connection) -> dict[str, float]:
    """One round. CPU times and the time between tokens in ms per step."""

    def cpu() -> dict[str, float]:
        of = psutil.Process(process).cpu_times()
        times = {f"{name}.{mode}": value for name, thread in threads.items()
                 for mode, value in zip(("user", "system"), ticks(process, thread))}  # fmt: skip
        return times | {"user": of.user, "system": of.system}

    before = cpu()
    clients.send(streams)
    first, end = clients.recv()
    after = cpu()
    between = (end - first) / (new - 1)
    per_step = {name: 1e3 * (after[name] - before[name]) / new for name in after}
    return {"streams": streams, "first": 1e3 * first, "between": 1e3 * between, **per_step}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--new", type=int, default=400)
    parser.add_argument("--step", type=float, default=1.5)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--kind", choices=ROUTES, default="completions")
    parser.add_argument("--logprobs", type=int, help="log-probabilities of this many tokens beside each")
    options = parser.parse_args()
    record = Record("serving_host", "uvicorn", "uvloop", "httptools", quiet=options.json)
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "serving.md").read_text()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        write_tokenizer(Path(place), text)
        ready, told = context.Pipe(duplex=False)
        gaps, step_s = context.Array("d", options.new // 2, lock=False), options.step / 1e3
        server = context.Process(target=serve, args=(Path(place), text, step_s, gaps, told))
        server.start()
        clients, theirs = context.Pipe()
        try:
            port, loop, engine = ready.recv()
            asked = (theirs, port, options.kind, options.new, options.logprobs)
            asking = context.Process(target=ask, args=asked, daemon=True)
            asking.start()
            theirs.close()
            assert server.pid is not None
            threads = {"loop": loop, "engine": engine}
            for count in options.streams:
                rows = []
                for _ in range(options.repeat + 1):
                    row = measure(count, options.new, server.pid, threads, clients)
                    row |= {"gap": 1e3 * statistics.median(gaps), "alone": 1e3 * alone(count, options.new, step_s)}
                    rows.append(row)
                record.rows += rows[1:]  # the first warms
                for name in ("user", "system", "loop.user", "engine.user", "gap", "alone", "between", "first"):
                    record.figure(f"{name}.{count}", [row[name] for row in rows[1:]], "ms")
        finally:
            server.terminate()
            with suppress(NameError):
                asking.terminate()
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
