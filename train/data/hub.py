"""Data sets on the Hugging Face hub: their names in recipes, and a quick check that the hub answers.

The check comes first because the hub's libraries retry for a minute before they fail.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source

HUB = "https://huggingface.co"
PATIENCE_S = 2.5
"""Seconds for name lookup and connection; a slower network could not stream text either."""
PREFIXES = ("hub:", "hf:")
FIX = "check the network and HF_ENDPOINT; or give data.source a folder of your files, or `sample`"
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


def require(repo: str, where: Source | None = None) -> None:
    """Raises `Mistakes` (exit 6) if no connection to the hub, or to the proxy before it, can be opened.

    With HF_HUB_OFFLINE nothing is checked: the library reads its cache.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return
    host, port = _address(os.environ.get("HF_ENDPOINT") or HUB)
    failed: list[str] = [f"no answer within {PATIENCE_S:g} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=PATIENCE_S).close()
            failed.clear()
        except OSError as error:
            failed[:] = [error.strerror or str(error)]

    asking = threading.Thread(target=connect, daemon=True)  # a name lookup may take longer than any timeout
    asking.start()
    asking.join(PATIENCE_S)
    if failed:
        message, why = f"{repo} cannot be read from the hub", f"{host}:{port}: {failed[0]}"
        raise Mistakes.one(message, exit=Exit.DATA, where=where, why=why, fix=FIX)


def _address(endpoint: str) -> tuple[str, int]:
    """The host and port that a request to `endpoint` connects to."""
    import urllib.parse
    import urllib.request  # takes 30 ms, which `validate` need not spend

    url = urllib.parse.urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and url.hostname and not urllib.request.proxy_bypass(url.hostname):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
