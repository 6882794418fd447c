"""`tpshard generate`: continues a text with a stored model."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from tpshard.cli.convert import Source
from tpshard.cli.shared.arguments import Device, Json, Overrides, on_device, refuse_unread
from tpshard.cli.shared.local_generation import (
    READ,
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

Prompt = Annotated[str, typer.Argument(metavar="TEXT", help="The text to continue; - reads it from stdin.")]


def generate(
    source: Source,
    prompt: Prompt,
    overrides: Overrides = None,
    adapter: Named = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    as_json: Json = False,
    device: Device = None,
) -> int:
    """Continue TEXT with the model in SOURCE, by the server's engine without a server.

    The model runs on `serve.mesh`. With --json the answer is the API's, at the end.
    """
    changes = on_device(overrides, device)
    refuse_unread("generate", changes, READ, "the model is stored")
    text = sys.stdin.read() if prompt == "-" else prompt
    body = without_unset(
        model=adapter, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop
    )
    with local_model(source, changes, body) as model:
        answer = model.answer({"prompt": text, **body}, (lambda _: None) if as_json else to_stdout)
    print(json.dumps(answer.whole()) if as_json else "", flush=True)
    if not as_json:
        usage = answer.usage()
        print(f"{usage['completion_tokens']} tokens, ended by {answer.choices[0].finish}", file=sys.stderr)
    return 0
