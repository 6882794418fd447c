"""Measures how long a server's `/health` takes while clients send it bodies of a megabyte.

    python benchmarks/serving_bodies.py URL [--seconds 20] [--clients 8]

URL is a running `tpshard serve` (http://127.0.0.1:8000). The clients, one process beside it, send one body after
another: texts, tokens, messages and nested lists, and read the refusals; most prompts are longer than the context.
`/health` is asked a hundred times a second, over one connection and over new ones in turn. Exits with 1 if the 99th
percentile is above 20 ms.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from record import Record, parser_of

MOST_S = 0.020


def bodies(model: str) -> list[bytes]:
    """Bodies of just under a megabyte, one of each kind."""
    word, message = "the quick brown fox ", {"role": "user", "content": "x" * 100}
    values = [
        {"prompt": word * 49_000},
        {"prompt": [word * 760] * 64},
        {"prompt": [7] * 320_000},
        {"messages": [message | {"content": "x" * 200}] * 4000},
        {"messages": [message | {"tool_calls": [{}] * 600}] * 350},
        {"prompt": [[]] * 240_000},
        {"prompt": "a", "logit_bias": {str(i): 1 for i in range(80_000)}},
        {"prompt": "a", "metadata": [{"a": i} for i in range(65_000)]},
    ]
    return [json.dumps({"model": model} | value).encode() for value in values]


def send(host: str, port: int, model: str, clients: int, seconds: float, results: Connection) -> None:
    """Sends bodies for some seconds, as many at once as there are clients; reports the number of each status."""
    statuses: Counter[int] = Counter()
    sent = bodies(model)
    results.send("ready")
    until = time.monotonic() + seconds

    def client(number: int) -> None:
        connection = http.client.HTTPConnection(host, port, timeout=300)
        while time.monotonic() < until:
            body = sent[number % len(sent)]
            path = "/v1/chat/completions" if b'"messages"' in body[:60] else "/v1/completions"
            connection.request("POST", path, body)
            response = connection.getresponse()
            response.read()
            statuses[response.status] += 1
            number += 1

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.send(dict(statuses))


def health(host: str, port: int, until: float) -> list[float]:
    """The seconds of each request to `/health` until the time is over."""
    taken, kept = [], http.client.HTTPConnection(host, port, timeout=60)
    while time.monotonic() < until:
        new = len(taken) % 2 == 1
        connection = http.client.HTTPConnection(host, port, timeout=60) if new else kept
        start = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        taken.append(time.perf_counter() - start)
        if new:
            connection.close()
        time.sleep(max(0.0, 0.01 - taken[-1]))
    return taken


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8)
    options: argparse.Namespace = parser.parse_args()
    record = Record("serving_bodies", quiet=options.json)
    place = urlsplit(options.url)
    host, port = place.hostname or "127.0.0.1", place.port or 80
    asked = http.client.HTTPConnection(host, port, timeout=60)
    asked.request("GET", "/v1/models")
    model = json.loads(asked.getresponse().read())["data"][0]["id"]
    idle = health(host, port, time.monotonic() + 2)
    context = multiprocessing.get_context("spawn")
    results, end = context.Pipe(duplex=False)
    arguments = (host, port, model, options.clients, options.seconds, end)
    clients = context.Process(target=send, args=arguments, daemon=True)
    clients.start()
    results.recv()
    taken = health(host, port, time.monotonic() + options.seconds)
    statuses: Counter[int] = results.recv()
    clients.join()
    record.rows.append({"statuses": {str(k): v for k, v in statuses.items()}, "asked": len(taken)})
    record.say(f"{len(taken)} requests to /health; answers to the bodies: {dict(statuses)}")
    cut = statistics.quantiles(taken, n=100)
    record.figure("health.idle", statistics.median(idle) * 1e3, "ms")
    record.figure("health.median", cut[49] * 1e3, "ms")
    record.figure("health.p99", cut[98] * 1e3, "ms")
    record.figure("health.most", max(taken) * 1e3, "ms")
    record.close(write=options.record, as_json=options.json)
    return 0 if cut[98] <= MOST_S and set(statuses) <= {200, 400, 413, 429} else 1


if __name__ == "__main__":
    sys.exit(main())
