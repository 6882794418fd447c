"""Loads a server with clients that come and go, and checks that no request, cache block or memory is lost.

    python benchmarks/serving_load.py URL [--minutes 5] [--clients 64] [--leave 0.2]

URL is a running `tpshard serve` (http://127.0.0.1:8000). Each client sends request after request with random prompts
(some shared), lengths and streaming; some requests are abandoned midway. At the end the server must be idle, all its
blocks must be free or cached, and every request must have been answered, refused with 429, or abandoned. Memory is that
of the listening process and its workers. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter

import httpx
import psutil

from record import Record, parser_of


class Left(Exception):
    """A client that leaves on purpose."""


async def ask(client: httpx.AsyncClient, url: str, model: str, leave: float, draw: random.Random) -> str:
    """Sends one request; returns ok, left, 429, or an error."""
    prompt = "the quick brown fox " * draw.randrange(1, 8) if draw.random() < 0.5 else "x" * draw.randrange(1, 40)
    max_tokens = draw.randrange(1, 64)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": draw.random() < 0.7,
    }
    left_after = draw.randrange(0, 8) if draw.random() < leave else None
    try:
        if not body["stream"]:
            timeout = None if left_after is None else 0.02 * left_after + 0.005
            response = await asyncio.wait_for(client.post(url, json=body), timeout)
            if response.status_code == 429:
                return "429"
            completed = response.json()["usage"]["completion_tokens"]
            return "ok" if response.status_code == 200 and completed == max_tokens else f"status {response.status_code}"
        lines = 0
        async with client.stream("POST", url, json=body) as response:
            if response.status_code == 429:
                return "429"
            async for line in response.aiter_lines():
                lines += bool(line)
                if left_after is not None and lines > left_after:
                    raise Left
                if line == "data: [DONE]":
                    return "ok"
        return "cut off"
    except (Left, TimeoutError):
        return "left"
    except httpx.HTTPError as error:
        return type(error).__name__


def memory(port: int) -> int:
    """Resident bytes of the server and its workers; 0 where they cannot be read."""
    for process in psutil.process_iter():
        try:
            if any(c.laddr.port == port and c.status == "LISTEN" for c in process.net_connections()):
                family = [process, *process.children(recursive=True)]
                return sum(p.memory_info().rss for p in family)
        except psutil.Error:
            continue
    return 0


def metrics(url: str, headers: dict[str, str]) -> dict[str, float]:
    text = httpx.get(url + "/metrics", headers=headers).text
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))}


async def load(url: str, model: str, options: argparse.Namespace, headers: dict[str, str]) -> Counter[str]:
    until = time.monotonic() + options.minutes * 60
    outcomes: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=options.clients)

    async def one(number: int, client: httpx.AsyncClient) -> None:
        draw = random.Random(number)
        while time.monotonic() < until:
            outcome = await ask(client, url + "/v1/completions", model, options.leave, draw)
            outcomes[outcome] += 1
            if outcome == "429":
                await asyncio.sleep(1)

    async with httpx.AsyncClient(limits=limits, timeout=120, headers=headers) as client:
        await asyncio.gather(*(one(i, client) for i in range(options.clients)))
    return outcomes


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--leave", type=float, default=0.2)
    options = parser.parse_args()
    record = Record("serving_load", quiet=options.json)
    url = options.url.rstrip("/").removesuffix("/v1")
    key = os.environ.get("TPSHARD_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    model = httpx.get(url + "/v1/models", headers=headers).json()["data"][0]["id"]
    port = httpx.URL(url).port or 80
    warm = argparse.Namespace(**{**vars(options), "minutes": options.minutes / 10})
    asyncio.run(load(url, model, warm, headers))  # caches fill and allocators settle before memory is compared
    before = memory(port)
    outcomes = asyncio.run(load(url, model, options, headers))
    deadline = time.monotonic() + 60
    while (now := metrics(url, headers))['tpshard_requests{state="running"}'] and time.monotonic() < deadline:
        time.sleep(0.1)
    after = memory(port)
    blocks = {state: now[f'tpshard_kv_blocks{{state="{state}"}}'] for state in ("total", "free", "cached")}
    grown = (after - before) / 2**20
    lost = {k: n for k, n in outcomes.items() if k not in ("ok", "left", "429")}
    record.rows.append({"outcomes": outcomes, "blocks": blocks})
    record.say(f"{dict(outcomes)}, {blocks}")
    record.figure("answers.right", outcomes["ok"], "answers")
    record.figure("answers.lost", sum(lost.values()), "answers")
    record.figure("memory.grown", grown, "MiB")
    record.figure("memory", after / 2**20, "MiB")
    record.close(write=options.record, as_json=options.json)
    back = blocks["free"] + blocks["cached"] == blocks["total"] and not now['tpshard_requests{state="waiting"}']
    return 0 if back and not lost and grown < 64 else 1


if __name__ == "__main__":
    sys.exit(main())
