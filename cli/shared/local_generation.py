"""A stored model that answers in this process, by the server's engine without HTTP."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tpshard.diagnostics.diagnostic import Exit, Mistakes

if TYPE_CHECKING:
    from tpshard.cli.shared.source_model import SourceModel
    from tpshard.programs.scheduling.request import Event
    from tpshard.recipes.keys.schema import Recipe
    from tpshard.serve.api.answers import Answer
    from tpshard.serve.api.field_checks import Refused
    from tpshard.serve.api.preprocess import Preprocessor
    from tpshard.serve.api.service import Service

READ = ("serve", "sharding", "annotate", "pin", "cluster", "data", "model", "run", "name", "timeout_s")
"""Sections that these commands obey."""
DEFAULT_TOKENS = 256

MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", help=f"Most tokens of an answer; default {DEFAULT_TOKENS}.")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", metavar="T", help="0: the likeliest token; default: the model's, or 1.")
]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="P", help="Draw from the likeliest tokens of this sum.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Draw the same tokens again.")]
Named = Annotated[str | None, typer.Option("--adapter", metavar="NAME", help="Answer with this of `serve.adapters`.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; repeatable.")]


@dataclass(frozen=True)
class LocalModel:
    """A model whose ranks are running."""

    service: Service
    preprocessor: Preprocessor

    def answer(self, body: Mapping[str, Any], write: Callable[[str], None]) -> Answer:
        """The answer to a request in the API's fields, a chat if it has `messages`; new text is written as it comes.

        Raises `Mistakes` where the request is refused or fails.
        """
        from tpshard.serve.api import fields
        from tpshard.serve.api.answers import Answer, sequences
        from tpshard.serve.api.field_checks import Refused

        parse = fields.chat if "messages" in body else fields.completion
        service, tokenizer = self.service, self.preprocessor.tokenizer
        try:
            order = parse({"model": self.preprocessor.model, **body}, self.preprocessor.defaults)
            prepared = self.preprocessor.prepare(order, service.limit, service.vocab, service.adapters)
            adapter = service.adapters.get(order.model)
            ordered = sequences(prepared.order, prepared.prompts, tokenizer, service.limit, adapter)
            answer = Answer(prepared.order, ordered, tokenizer, prepared.echoes)
            (choice,) = answer.choices
            events: queue.Queue[list[Event]] = queue.Queue()
            service.submit(ordered, events.put)
            try:
                while not answer.done:
                    for event in events.get():
                        answer.take(event)
                    write(choice.unsent)
            finally:
                service.cancel(ordered)
        except Refused as error:
            raise _mistake(error) from error
        return answer


@contextlib.contextmanager
def local_model(
    source: str, overrides: Sequence[str], body: Mapping[str, Any], chats: bool = False
) -> Iterator[LocalModel]:
    """Starts the ranks of a stored model and ends them; `chats`: it needs a chat template.

    SOURCE is a recipe (its latest checkpoint), a run, a checkpoint or a Hugging Face folder. `body`: the fields that
    all requests will have; they are checked before anything is loaded. Raises `Mistakes`.
    """
    from tpshard.cli.serve import generation_defaults, memory_need, open_tokenizer, start_service, stored_model
    from tpshard.models.folders.chat_template import ChatTemplate
    from tpshard.serve.api import fields
    from tpshard.serve.api.field_checks import Refused
    from tpshard.serve.api.preprocess import Preprocessor

    try:
        fields.completion({"model": source, "prompt": "text", **body})
    except Refused as error:
        raise _mistake(error) from error
    recipe, model = _opened(source, overrides)
    if (named := body.get("model")) is not None and named not in recipe.serve.adapters:
        served = ", ".join(recipe.serve.adapters)
        why = f"it has {served}" if served else "it names none"
        fix = f'"serve.adapters={{{named}: FOLDER}}"' if not served else "one of these, or no --adapter"
        message = f"`--adapter {named}` is none of `serve.adapters`"
        raise Mistakes.one(message, exit=Exit.USAGE, why=why, fix=fix)
    need = memory_need(recipe, stored_model(recipe, model))
    tokenizer = open_tokenizer(recipe, model, need)
    if chats and tokenizer.chat_template is None:
        raise Mistakes.one(
            f"{model.tokenizer} has no chat template", exit=Exit.DATA,
            fix=f"`tpshard generate {source} TEXT` continues a text",
        )  # fmt: skip
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate(tokenizer.chat_template, tokenizer.special)
    defaults = {"usual_max_tokens": DEFAULT_TOKENS, **generation_defaults(recipe, model)}
    service = start_service(recipe, model, need)
    try:
        yield LocalModel(service, Preprocessor(recipe.name, tokenizer, template, defaults))
    finally:
        service.close()


def to_stdout(text: str) -> None:
    """Writes new text of an answer at once."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def without_unset(**options: Any) -> dict[str, Any]:
    """The fields of a request that the command line sets."""
    return {key: value for key, value in options.items() if value is not None and value != []}


def _opened(source: str, overrides: Sequence[str]) -> tuple[Recipe, SourceModel]:
    """The recipe by which a model is served, and the model: its run's recipe, or for a folder one that names it."""
    from tpshard.cli.serve import model_of
    from tpshard.cli.shared.arguments import load
    from tpshard.cli.shared.sources import MANIFEST, holds_model, open_source, opened_location, run_recipe
    from tpshard.recipes.reading.load import loads

    path = opened_location(source)
    if not holds_model(path):
        recipe = load(source, overrides)
        return recipe, model_of(source, list(overrides), recipe)
    if (path / MANIFEST).is_file() and run_recipe(path).is_file():
        recipe = load(str(run_recipe(path)), overrides)
    else:
        named = {"name": Path(source).resolve().name or "model", "serve": {"mesh": {"tp": 1}, "checkpoint": str(path)}}
        recipe = loads(json.dumps(named | {"model": {"preset": "tiny"}}), overrides, file=source)
    return recipe, open_source(source, modules=True, trusted=recipe)


def _mistake(error: Refused) -> Mistakes:
    """A refusal as the command's error: of the request (2), of the tokenizer (6), or of the engine (9)."""
    codes = {"tokenizer_failed": Exit.DATA, "engine_failed": Exit.WORKER_LOST}
    code = codes.get(error.code or "", Exit.USAGE)
    fix = "shorten the text, or --max-tokens" if error.code == "context_length_exceeded" else "correct it"
    return Mistakes.one(error.message, exit=code, fix=fix if code == Exit.USAGE else "the lines above name the cause")
