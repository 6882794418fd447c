"""The C library's heap in a process that computes on a CPU."""

from __future__ import annotations

import ctypes
import platform
import resource

import pytest
from tpshard.parallelism.runtime import workers
from tpshard.parallelism.runtime.heap import MAPPED_BYTES, give_back, in_huge_pages, keep_freed_memory


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
    give_back()
    assert page_faults_of_step() > 16_000  # some of it may be mapped in one piece


def test_a_workers_heap_asks_for_huge_pages_and_keeps_what_the_user_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    started = workers.Workers(world=1)
    try:
        started.start(["sh", "-c", 'test "$GLIBC_TUNABLES" = glibc.malloc.check=0:glibc.malloc.hugetlb=1'])
        assert started.all[0].process.wait() == 0
    finally:
        started.close()
    assert in_huge_pages({}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert in_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=2"}) == {}, "the user's own choice stays"
