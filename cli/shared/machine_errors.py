"""The errors of the system that are no bug: names it refuses, disks, permissions and limits of the process."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

from tpshard.diagnostics.diagnostic import Diagnostic, Exit

NAMES = (errno.ENAMETOOLONG, errno.ELOOP)
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ESTALE)
LIMITS = {
    "memory": ("v", resource.RLIMIT_AS),
    "open files": ("n", resource.RLIMIT_NOFILE),
    "processes and threads": ("u", resource.RLIMIT_NPROC),
}
"""What a process may have, with the letter of the shell's `ulimit` and its number."""

SIGNS = {
    "too many open files": "open files",
    "start new thread": "processes and threads",
    "resource temporarily unavailable": "processes and threads",
    "allocate memory": "memory",
    "bad_alloc": "memory",
    "failed to map segment": "memory",
    "memory protection": "memory",
}
"""Words by which errors of libraries tell that a limit is reached."""


def of_machine(error: BaseException) -> Diagnostic | None:
    """The diagnostic for an error that this machine, or a name on the command line, caused; None for others."""
    text = f"{error}".strip().splitlines()[0] if f"{error}".strip() else type(error).__name__
    if isinstance(error, OSError) and (fix := getattr(error, "fix", "")):  # of an object store
        return Diagnostic(text, Exit.MACHINE, None, "", str(fix))
    if isinstance(error, OSError):
        name = "" if error.filename is None else _shortened(str(error.filename))
        said = f"{name}: {error.strerror}" if name else text
        if error.errno in NAMES:
            return Diagnostic(said, Exit.USAGE, None, "", "give another path")
        if error.errno in DISK:
            return Diagnostic(said, Exit.MACHINE, None, "", "choose another place, or make room and permissions there")
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return _limited("open files", said)
        if error.errno == errno.EAGAIN:
            return _limited("processes and threads", said)
        if error.errno == errno.ENOMEM:
            return _limited("memory", said)
    if isinstance(error, RuntimeError) and text.startswith("Symlink loop"):
        return Diagnostic(_shortened(text), Exit.USAGE, None, "", "give another path")
    if isinstance(error, MemoryError):
        return _limited("memory", text)
    if isinstance(error, SystemError) and _is_at_limit():  # extensions forget to raise MemoryError
        return _limited("memory", text)
    if isinstance(error, RuntimeError | ImportError):  # of libraries in C++
        return next((_limited(what, text) for sign, what in SIGNS.items() if sign in text.lower()), None)
    return None


def _is_at_limit() -> bool:
    """Whether this process has nearly all the memory that it may have."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return False
    return most != resource.RLIM_INFINITY and pages * resource.getpagesize() > 0.9 * most


def _limited(what: str, why: str) -> Diagnostic:
    letter, number = LIMITS[what]
    most = resource.getrlimit(number)[0]
    if most == resource.RLIM_INFINITY:
        fix = f"end other processes, or use a machine with more {what}"
    else:
        fix = f"raise the limit of this shell, now {most // 1024 if letter == 'v' else most}: ulimit -{letter}"
    return Diagnostic(f"this process may have no more {what}", Exit.MACHINE, None, why, fix)


def _shortened(text: str) -> str:
    """A text cut in its middle if it is longer than any name."""
    return text if len(text) <= 255 else f"{text[:100]}...{text[-100:]}"
