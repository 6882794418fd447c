"""Measures the time of a server's host besides its programs, for `tpshard doctor --measure`.

`tpshard serve` runs a random model of one narrow layer, whose steps take next to no time, and one or several clients
on this machine stream its answers over HTTP. The time per token, less the price of the step's program, is the host's.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.parallelism.pricing.cost import ServingOverhead
from tpshard.parallelism.pricing.fusion import CacheReads

PROMPT, ANSWER = 8, 64
"""Tokens of each request and of its answer."""
CLIENTS = (1, 8)
ROUNDS = 5
"""Repetitions with each number of clients; the median counts."""


def measure_server(device_file: str) -> ServingOverhead:
    """Measures the host's time per step, token and request of a server on this CPU, in about fifteen seconds.

    device_file: the text of a file of this machine, which prices the steps. Raises `Mistakes` (exit 5) if the server
    does not start.
    """
    with tempfile.TemporaryDirectory(prefix="tpshard-doctor-") as scratch:
        model = _write_model(Path(scratch, "model"))
        device = Path(scratch, "machine.yaml")
        device.write_text(device_file)
        step_s = _price(model, device)
        per_token: dict[int, list[float]] = {count: [] for count in CLIENTS}
        first: list[float] = []
        with _server(model, Path(scratch, "errors")) as port, ThreadPoolExecutor(max(CLIENTS)) as clients:
            for _ in range(1 + ROUNDS):
                for count in CLIENTS:
                    answers = list(clients.map(lambda _: _ask(port), range(count)))
                    per_token[count].append(statistics.median(tpot for _, tpot in answers))
                    if count == 1:
                        first.append(answers[0][0])
    # the first round opens files and connections that later ones find open
    alone, together = (statistics.median(per_token[count][1:]) for count in CLIENTS)
    token_s = max(0.0, together - alone) / (CLIENTS[1] - CLIENTS[0])
    host_s = max(0.0, alone - step_s - token_s)
    return ServingOverhead(host_s, token_s, max(0.0, statistics.median(first[1:]) - alone))


def _write_model(folder: Path) -> Path:
    """Writes a random Llama of one layer, with the sample's tokenizer, into `folder`."""
    from tpshard.models import build, to_hf
    from tpshard.models.families.config import ModelConfig
    from tpshard.train.data.sample import VOCAB, ensure_sample

    config = ModelConfig(
        family="llama", layers=1, width=64, heads=2, kv_heads=2, head_dim=32, mlp=128, vocab=VOCAB, max_seq=128,
        seq_len=128, dtype="fp32",
    )  # fmt: skip
    to_hf(build(config, device="cpu", seed=0), folder)
    for file in ensure_sample().tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def _recipe(model: Path) -> list[str]:
    return [f"serve.checkpoint={model}", "serve.mesh={tp: 1}", f"serve.requests={max(CLIENTS)}"]


def _price(model: Path, device: Path) -> float:
    """Seconds that the planner predicts for the program of a server's step of one row."""
    from tpshard.plan.server.server_prices import ServerBuilder
    from tpshard.recipes.reading.load import loads

    changes = [*_recipe(model), f"cluster.device={device}", "cluster.devices_per_node=1"]
    server = ServerBuilder().build(loads("name: tiny\nmodel: {preset: tiny}\n", changes))
    return server.prices(1, CacheReads(3, 3))


@contextmanager
def _server(model: Path, errors: Path) -> Iterator[int]:
    """Runs `tpshard serve` for a model; yields its port."""
    serve = [sys.executable, "-P", "-m", "tpshard.cli.main", "serve"]
    with errors.open("w") as log:
        process = subprocess.Popen(
            [*serve, "tiny", *_recipe(model), "cluster.device=cpu", "serve.port=0"],
            stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True, env=_environment(),
        )  # fmt: skip
        try:
            assert process.stdout is not None
            yield _port(process.stdout, errors)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment() -> dict[str, str]:
    """This process's environment without an API key, which the clients would have to send."""
    return {name: value for name, value in os.environ.items() if name != "TPSHARD_API_KEY"}


def _port(output: IO[str], errors: Path) -> int:
    announced = re.search(r"on http://127\.0\.0\.1:(\d+)/", output.readline())
    if announced is None:
        lines = errors.read_text().strip().splitlines()
        raise Mistakes.one(
            "the server to be measured did not start", exit=Exit.MACHINE, why=lines[-1] if lines else "",
            fix="`tpshard doctor` checks this machine",
        )  # fmt: skip
    return int(announced[1])


def _ask(port: int) -> tuple[float, float]:
    """Sends one request; returns (seconds to the first token, seconds per further token)."""
    body = json.dumps({
        "model": "tiny", "prompt": list(range(300, 300 + PROMPT)), "max_tokens": ANSWER, "ignore_eos": True,
        "stream": True,
    })  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    sent = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    came = [time.perf_counter() for line in response if line.startswith(b"data: {")]
    connection.close()
    if response.status != 200 or not came:
        message = f"the server answers {response.status} to a request for {ANSWER} tokens"
        raise Mistakes.one(message, exit=Exit.MACHINE, fix="`tpshard doctor` checks this machine")
    return came[0] - sent, (came[-1] - came[0]) / (ANSWER - 1)
