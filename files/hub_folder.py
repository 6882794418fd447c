"""Models and tokenizers of the Hugging Face hub, hf:OWNER/NAME@REVISION: folders where its own library keeps them.

Only JSON, templates and safetensors are fetched. A quick check comes first whether the hub answers, because the library
retries for a minute before it fails.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from functools import cache

from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source

HUB = "https://huggingface.co"
PATIENCE_S = 2.0
"""Seconds for name lookup, connection and the first byte of an answer; a slower network could not stream text."""
PREFIX = "hf:"
SMALL = ("*.json", "*.jinja")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
OTHERS = ("*/*", "consolidated*", "pytorch_model*")
"""Copies of the same weights in other formats."""


def folder_of(name: str, where: Source | None = None, *, weights: bool = True) -> str:
    """The folder of a model or tokenizer, fetched if need be; a name that is none of the hub's as it is.

    weights: whether a model's weights are fetched too. Raises `Mistakes`: exit 3 for a wrong name, 6 where the hub does
    not have it, or cannot be reached and the cache is without it.
    """
    if not name.startswith(PREFIX):
        return name
    if not (match := re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)):
        message, fix = f"`{name}` is no name of a model on the hub", "hf:OWNER/NAME or hf:OWNER/NAME@REVISION"
        raise Mistakes.one(message, exit=Exit.RECIPE, where=where, fix=fix)
    try:
        return _fetched(match[1], match[2], weights)
    except Exception as error:  # network, hub, login and cache raise many types
        raise Mistakes.one(
            f"{name} cannot be read from the hub", exit=Exit.DATA, where=where, why=why_not(error),
            fix="check the name, the network and HF_ENDPOINT (`hf auth login` for gated models); or name a folder",
        ) from error  # fmt: skip


@cache
def _fetched(repo: str, revision: str | None, weights: bool) -> str:
    unreachable = unreached()
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not (weights and sys.stderr.isatty()):
        disable_progress_bars()
    try:
        place: str = snapshot_download(
            repo, revision=revision, allow_patterns=[*SMALL, *WEIGHTS * weights],
            ignore_patterns=[*OTHERS, *[WEIGHTS[1]] * (not weights)], local_files_only=bool(unreachable),
        )  # fmt: skip
    except Exception:
        if unreachable:
            raise ConnectionError(unreachable) from None
        raise
    return place


def why_not(error: BaseException) -> str:
    """Why the hub or its cache does not give something, in a sentence of one line."""
    from huggingface_hub import errors

    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    if isinstance(cause, errors.HfHubHTTPError):  # the library went on to look into its cache
        return why_not(cause)
    if isinstance(error, errors.GatedRepoError):
        return "it is gated, and there is no login here, or one without access, which its page on the hub gives"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has none of this name, or it is private and this login may not read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has it, but not in this revision"
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        return f"the hub answered {error.response.status_code} {error.response.reason_phrase}".strip()
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {said[0] if said else ''}".removeprefix("ConnectionError: ")


def unreached() -> str:
    """Why only the cache of the hub's library can be read; "" where the hub answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set, and the cache is without it"
    return _out_of_reach(os.environ.get("HF_ENDPOINT") or HUB)


@cache
def _out_of_reach(endpoint: str) -> str:
    """Why a hub answers no request, as one behind a proxy or a firewall may take connections alone; "" if it does.

    A command asks once: what is not there for a model is not there for its data either.
    """
    from huggingface_hub.utils import get_session

    failed: list[str] = [f"no answer within {PATIENCE_S:g} s"]

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=PATIENCE_S)  # any answer will do
            failed.clear()
        except Exception as error:  # the session's own types, which have no name here
            failed[:] = [failed[0] if "Timeout" in type(error).__name__ else str(error) or type(error).__name__]

    asking = threading.Thread(target=ask, daemon=True)  # a name lookup may take longer than any timeout
    asking.start()
    asking.join(PATIENCE_S)
    return f"{endpoint}: {failed[0]}" if failed else ""
