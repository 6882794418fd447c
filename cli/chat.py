"""`tpshard chat`: a conversation with a stored model, line by line."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from tpshard.cli.convert import Source
from tpshard.cli.shared.arguments import Device, Json, Overrides, on_device, refuse_unread
from tpshard.cli.shared.local_generation import (
    READ,
    LocalModel,
    MaxTokens,
    Named,
    Seed,
    Stop,
    Temperature,
    TopP,
    local_model,
    to_stdout,
    without_unset,
)

System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="What the model is told first.")]


def chat(
    source: Source,
    overrides: Overrides = None,
    adapter: Named = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    as_json: Json = False,
    device: Device = None,
) -> int:
    """Talk with the model in SOURCE: each line of stdin is a message, /exit or the end of the input ends.

    The model runs on `serve.mesh`. With --json each answer is a line, the API's.
    """
    changes = on_device(overrides, device)
    refuse_unread("chat", changes, READ, "the model is stored")
    body = without_unset(
        model=adapter, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop
    )
    messages = [] if system is None else [{"role": "system", "content": system}]
    with local_model(source, changes, body, chats=True) as model:
        _converse(model, messages, body, as_json)
    return 0


def _converse(model: LocalModel, messages: list[dict[str, Any]], body: dict[str, Any], as_json: bool) -> None:
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if not line.strip():
            continue
        messages = [*messages, {"role": "user", "content": line.rstrip("\n")}]
        answer = model.answer({"messages": messages, **body}, (lambda _: None) if as_json else to_stdout)
        whole = answer.whole()
        print(json.dumps(whole) if as_json else "", flush=True)
        messages = [*messages, whole["choices"][0]["message"]]
