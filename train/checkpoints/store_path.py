"""Objects of a store by path, through fsspec: the methods of `pathlib.Path` that checkpoints need, and uploads.

Credentials and endpoints come from the environment, as the store's own tools read them; no name holds any.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source
from tpshard.recipes.keys.stores import SCHEMES, is_url, without_secrets, wrong_store

PART = 32 << 20
"""Bytes of a part of an upload, at least; a larger file is sent in several."""
MOST_PARTS = 9000
"""Parts of one upload at most (S3 allows 10,000)."""
EXTRA = "pip install 'tpshard[stores]'"


class StoreError(OSError):
    """A store did not do what it was asked for."""

    def __init__(self, message: str, fix: str = "try again later"):
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True)
class StoredObject:
    """What a store says of an object."""

    size: int
    tag: str
    """Changes with the content: S3's ETag, or crc32c."""


@dataclass(frozen=True)
class StorePath:
    """An object, or the objects below a prefix. A prefix exists as long as there are objects below it.

    Methods raise FileNotFoundError for what is missing, and `StoreError` where the store fails, after retries.
    """

    url: str
    """Without a slash at the end."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        return StorePath(self.url.rpartition("/")[0])

    def absolute(self) -> StorePath:
        return self

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def bucket(self) -> str:
        return self.url.partition("://")[2].partition("/")[0]

    @property
    def key(self) -> str:
        return self.url.partition("://")[2].partition("/")[2]

    def files(self) -> dict[str, StoredObject]:
        """The objects below this prefix, by their names relative to it."""
        with _as_store_error(self):
            found = _file_system(self.scheme).find(self.url, detail=True)
            start = len(self.url.partition("://")[2]) + 1
            return {path[start:]: _object(info) for path, info in found.items() if len(path) > start}

    def stat(self) -> StoredObject:
        with _as_store_error(self):
            info = _file_system(self.scheme).info(self.url)
            if info["type"] != "file":
                raise FileNotFoundError(f"{self} is no object")
            return _object(info)

    def is_file(self) -> bool:
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def read_bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """An object, or its bytes from `start` to `end`."""
        with _as_store_error(self):
            return bytes(_file_system(self.scheme).cat_file(self.url, start=start, end=end))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def parts(self) -> Iterator[bytes]:
        """The bytes of an object, one part after another."""
        size = self.stat().size
        return (self.read_bytes(start, min(start + PART, size)) for start in range(0, size, PART))

    def write_bytes(self, data: bytes, *, new: bool = False) -> None:
        """Writes an object at once. `new`: FileExistsError if it exists."""
        with _as_store_error(self):
            _file_system(self.scheme).pipe_file(self.url, data, **({"mode": "create"} if new else {}))

    def write(self, size: int, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
        """Writes an object of `size` bytes, in parts where it is large; returns its size and sha256.

        It appears when its last byte is written. An upload that fails leaves nothing, and one whose process is killed
        is ended by `clear_uploads`.
        """
        digest, written, part = hashlib.sha256(), 0, max(PART, -(-size // MOST_PARTS))
        with _as_store_error(self):
            file = _file_system(self.scheme).open(self.url, "wb", block_size=part)
            try:
                for chunk in chunks:
                    view = memoryview(chunk)
                    digest.update(view)
                    written += len(view)
                    for start in range(0, len(view), part):
                        file.write(view[start : start + part])
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    file.discard()
                file.closed = True  # or its finalizer would write once more
                raise
        return written, digest.hexdigest()

    def unlink(self) -> None:
        """Removes an object, if it is there."""
        with _as_store_error(self), contextlib.suppress(FileNotFoundError):
            _file_system(self.scheme).rm_file(self.url)

    def clear_uploads(self) -> int:
        """Ends the uploads below this prefix that were never completed; returns their number. Google's stores end
        them by themselves, after a week."""
        if self.scheme != "s3":
            return 0
        system, ended = _file_system(self.scheme), 0
        with _as_store_error(self):
            listed = system.call_s3("list_multipart_uploads", Bucket=self.bucket, Prefix=f"{self.key}/")
            for upload in listed.get("Uploads") or ():
                place = {"Bucket": self.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                system.call_s3("abort_multipart_upload", **place)
                ended += 1
        return ended


Location = Path | StorePath
"""A folder or a file: of this machine, or of an object store."""


def location(name: str) -> Location:
    """The place that a name on a command line or in a recipe stands for."""
    return StorePath(name) if is_url(name) else Path(name)


def require_store(place: StorePath, where: Source | None = None) -> None:
    """Raises `Mistakes` (exit 5) where a store cannot be reached from here, within a few seconds: a name that is none,
    a package, credentials, a network or a bucket that is missing."""
    if (wrong := wrong_store(place.url)) is not None:
        message = f"{without_secrets(place.url)}: {wrong[0]}"
        raise Mistakes.one(message, exit=Exit.USAGE, where=where, fix=wrong[1])
    try:
        system = _new_file_system(place.scheme, attempts=1)
    except ImportError as error:
        raise Mistakes.one(
            f"{place} needs the package {SCHEMES[place.scheme]}", exit=Exit.MACHINE, where=where, why=str(error),
            fix=EXTRA,
        ) from error  # fmt: skip
    try:
        with _as_store_error(place):
            if place.scheme == "s3":
                system.call_s3("list_objects_v2", Bucket=place.bucket, Prefix=place.key, MaxKeys=1)
            else:
                system.info(f"{place.scheme}://{place.bucket}")
    except FileNotFoundError as error:
        raise Mistakes.one(
            f"there is no bucket {place.bucket}", exit=Exit.MACHINE, where=where, why=str(error),
            fix="create it, or correct the name",
        ) from error  # fmt: skip
    except OSError as error:
        raise Mistakes.one(
            f"{place} cannot be reached", exit=Exit.MACHINE, where=where, why=str(error),
            fix=getattr(error, "fix", "try again later"),
        ) from error  # fmt: skip


_FIXES = (
    ("Credential", "set the store's credentials in the environment, such as AWS_ACCESS_KEY_ID, AWS_PROFILE, or "
     "GOOGLE_APPLICATION_CREDENTIALS"),
    ("Permission", "a key that may list, read and write there; or another bucket"),
    ("Connect", "check the network, and AWS_ENDPOINT_URL where the store is not Amazon's own"),
)  # fmt: skip
"""What to do, by words in the names of the classes of errors."""


@contextlib.contextmanager
def _as_store_error(place: StorePath) -> Iterator[None]:
    """Raises the errors of a store and of its client's libraries as `StoreError`, which no message can tell apart."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, StoreError):
        raise
    except Exception as error:
        names = " ".join(kind.__name__ for kind in type(error).__mro__)
        text = " ".join(str(error).split()) or type(error).__name__
        again = "try again later" if isinstance(error, OSError) else "correct what the environment says of the store"
        fix = next((fix for word, fix in _FIXES if word in names), again)
        raise StoreError(f"{place}: {text[:300]}", fix) from error


def _object(info: dict[str, Any]) -> StoredObject:
    tags = (info.get(key) for key in ("ETag", "crc32c", "md5Hash"))
    return StoredObject(int(info["size"]), next((str(tag).strip('"') for tag in tags if tag), ""))


@functools.cache
def _file_system(scheme: str) -> Any:
    """The process's client of a store."""
    return _new_file_system(scheme)


def _new_file_system(scheme: str, attempts: int = 0) -> Any:
    """A client of a store without a cache. attempts: tries of each request; 0: the library's own number."""
    import importlib

    module = importlib.import_module(SCHEMES[scheme])
    if scheme == "gs":
        logging.getLogger("gcsfs").setLevel(logging.ERROR)  # it warns of each bucket whose kind it does not know
        return module.GCSFileSystem(use_listings_cache=False, skip_instance_cache=True)
    retries = {"retries": {"total_max_attempts": attempts}} if attempts else {}
    system = module.S3FileSystem(
        use_listings_cache=False, skip_instance_cache=True, fixed_upload_size=True,
        config_kwargs={"connect_timeout": 5, "read_timeout": 60, **retries},
    )  # fmt: skip
    system.retries = attempts or system.retries
    return system
