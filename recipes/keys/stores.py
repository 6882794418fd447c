"""The names of object stores: `s3://bucket/prefix` and `gs://bucket/prefix`."""

from __future__ import annotations

import re
from pathlib import Path

SCHEMES = {"s3": "s3fs", "gs": "gcsfs"}
"""The schemes of stores, with the package that reads and writes each."""


def is_url(text: object) -> bool:
    """Whether text has a scheme, be it one that is known here or not. `s3:/x`, which lacks a slash, is meant as one."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|(s3|gs):", str(text)) is not None


def without_secrets(text: str) -> str:
    """Text with the credentials in a URL replaced, as in s3://KEY:SECRET@BUCKET."""
    return re.sub(r"(://)[^/\s]*@", r"\1***@", text)


def wrong_store(url: str) -> tuple[str, str] | None:
    """Why a URL names no store that tpshard writes, and a fix; None if it names one."""
    scheme, slashes, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if not slashes:
        scheme, _, rest = url.partition(":")
        return "two slashes come before a bucket", f"{scheme}://{rest.lstrip('/') or 'BUCKET/PREFIX'}"
    if scheme not in SCHEMES:
        like = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}.get(scheme.lower(), scheme.lower())
        known = f"{like}://{rest}" if like in SCHEMES else "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, or a folder"
        return f"no object store is read through {scheme}://", known
    if "@" in bucket or "?" in rest or "#" in rest:
        return "a name of a store holds no credentials and no options", "leave them to the environment"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket):
        return "it names no bucket", f"{scheme}://BUCKET/PREFIX"
    parts = prefix.rstrip("/").split("/") if prefix.strip("/") else []
    if any(part in ("", ".", "..") or not part.isprintable() for part in parts):
        return "a part of its prefix is empty, a dot, or not printable", f"{scheme}://{bucket}/PREFIX"
    return None


def local_folder(url: str) -> Path:
    """The folder of this host for the files that a run in a store writes all the time, from the working directory."""
    scheme, _, rest = url.partition("://")
    return Path("runs") / scheme / rest.rstrip("/")
