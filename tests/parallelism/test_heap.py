"""The C library's heap in a process that computes on a CPU."""

from __future__ import annotations

import ctypes
import platform
import resource

import pytest
from tpshard.parallelism.runtime.heap import MAPPED_BYTES, keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_memory_that_a_step_freed_is_not_cleared_again_for_the_next_one() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    size, held = MAPPED_BYTES - 4096, [0] * 4

    def page_faults_of_step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for i in range(len(held)):
            held[i] = libc.malloc(size)
            ctypes.memset(held[i], 1, size)
        for address in held:
            libc.free(address)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    keep_freed_memory()
    page_faults_of_step()
    assert page_faults_of_step() < 100  # of 32,764 pages
