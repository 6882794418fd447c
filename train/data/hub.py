"""Data sets on the Hugging Face hub: their names in recipes, and what identifies their files."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source
from tpshard.files.hub_folder import unreached

PREFIXES = ("hub:", "hf:")
FIX = (
    "check the name, the network and HF_ENDPOINT (`hf auth login` for gated data); or name a folder of your files, or "
    "`sample`"
)
CONFIGURATION = "name one of its configurations: `hub:OWNER/NAME:CONFIGURATION`"


def is_on(source: str) -> bool:
    """Whether a `data.source` is a data set on the hub."""
    return source == "c4" or source.startswith(PREFIXES)


def name_of(source: str) -> tuple[str, str | None, str | None]:
    """The repository of a source `hub:OWNER/NAME@REVISION:CONFIGURATION`, its configuration and its revision; None for
    what is not named."""
    named, _, configuration = source.partition(":")[2].partition(":") if source != "c4" else (source, "", "")
    repo, _, revision = named.partition("@")
    return repo, configuration or None, revision or None


def identities(urls: Sequence[str]) -> dict[str, str]:
    """The hub's hashes of the contents of files, by their URLs; without those that it does not tell.

    A revision is none of the content: it changes with a README. One request for each folder and thousand files.
    """
    from huggingface_hub import HfFileSystem

    told: dict[str, str] = {}
    files = HfFileSystem()
    for folder in {url.rpartition("/")[0] for url in urls if url.startswith("hf://")}:
        with contextlib.suppress(Exception):  # network, login and cache raise many types: then nothing is compared
            entries: Any = files.ls(folder, detail=True)
            told |= {f"hf://{entry['name']}": str(entry.get("blob_id") or "") for entry in entries}
    return {url: told[url] for url in urls if told.get(url)}


def place_of(source: str, where: Source | None = None) -> str:
    """Where a source is read: its repository's name where the hub answers, else its folder in the cache of the hub's
    library. Raises `Mistakes` (exit 6) where it has none there."""
    repo, _, revision = name_of(source)
    if not (why := unreached()):
        return repo
    from huggingface_hub import snapshot_download

    try:
        folder: str = snapshot_download(repo, repo_type="dataset", revision=revision, local_files_only=True)
    except Exception as error:  # no cache, no name of a repository
        message = f"{repo} cannot be read from the hub"
        raise Mistakes.one(message, exit=Exit.DATA, where=where, why=why, fix=FIX) from error
    return folder
