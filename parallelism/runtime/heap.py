"""The C library's heap of a process that computes on a CPU."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping
from contextlib import suppress

MAPPED_BYTES = 1 << 25
"""Bytes from which glibc maps each tensor anew instead of taking it from the heap: the most that it can be set to."""

TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def keep_freed_memory() -> None:
    """Makes the heap keep what is freed, so that no step pays the page faults of new memory; glibc only.

    By default glibc returns the free end of the heap to the system, which hands the same pages out again, cleared, in
    the next step. Tensors of `MAPPED_BYTES` and more still go back to the system when they are freed.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, MAPPED_BYTES)  # M_MMAP_THRESHOLD
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def give_back() -> None:
    """Returns the heap's freed memory to the system, whatever is kept otherwise; glibc only. The next step pays for new
    pages."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def in_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes glibc ask for huge pages in a process with this environment; others ignore it.

    A product of few rows reads each weight once, from memory: with pages of 4 KiB the processor waits for their
    addresses. (On virtual machines, where a lookup takes longest, such a product took 1.3 times as long.)
    """
    own = environment.get(TUNABLES, "")
    if "glibc.malloc.hugetlb" in own:
        return {}
    return {TUNABLES: f"{own}:{HUGE_PAGES}".lstrip(":")}
