"""The model of torch's allocator, by cases that follow from the rules of CUDACachingAllocator.cpp."""

from __future__ import annotations

import random

import pytest
from tpshard.parallelism.pricing.allocator import PAGE, CachingAllocator

KIB, MIB = 2**10, 2**20


def reserved(sizes: list[int], *, expandable: bool) -> int:
    allocator = CachingAllocator(expandable=expandable)
    for size in sizes:
        allocator.malloc(size)
    return allocator.reserved


@pytest.mark.parametrize(
    ("size", "plain", "expandable"),
    [
        (1, 2 * MIB, 2 * MIB),
        (MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, 20 * MIB, PAGE),
        (10 * MIB - 512, 20 * MIB, PAGE),
        (10 * MIB, 10 * MIB, PAGE),
        (21 * MIB + 1, 22 * MIB, 2 * PAGE),
    ],
)
def test_a_request_takes_a_segment_or_pages_of_its_pools_size(size: int, plain: int, expandable: int) -> None:
    assert reserved([size], expandable=False) == plain
    assert reserved([size], expandable=True) == expandable


def test_small_requests_share_a_segment_and_are_rounded_to_512_bytes() -> None:
    allocator = CachingAllocator(expandable=False)
    for _ in range(4096):
        allocator.malloc(1)
    assert allocator.allocated == allocator.reserved == 4096 * 512
    allocator.malloc(513)
    assert allocator.allocated == 4096 * 512 + 1024
    assert allocator.reserved == 4 * MIB


def test_the_rest_of_a_large_block_is_used_only_above_one_mib() -> None:
    for size, used in ((19 * MIB, 20 * MIB), (18 * MIB, 18 * MIB)):
        allocator = CachingAllocator(expandable=False)
        allocator.free(allocator.malloc(20 * MIB))
        allocator.malloc(size)
        assert allocator.allocated == used


def test_segments_that_cannot_be_joined_are_what_expandable_ones_save() -> None:
    """Two freed blocks of 32 MiB serve one of 64 MiB if their segment is one."""
    for expandable, most in ((False, 128 * MIB), (True, 4 * PAGE)):
        allocator = CachingAllocator(expandable=expandable)
        keys = [allocator.malloc(32 * MIB), allocator.malloc(32 * MIB)]
        for key in keys:
            allocator.free(key)
        allocator.malloc(64 * MIB)
        assert allocator.most_reserved == most


def test_a_hole_between_blocks_in_use_is_reserved_and_unused() -> None:
    allocator = CachingAllocator(expandable=True)
    keys = [allocator.malloc(40 * MIB) for _ in range(3)]
    allocator.free(keys[1])
    allocator.malloc(60 * MIB)
    assert allocator.reserved == 120 * MIB + 60 * MIB
    allocator.malloc(40 * MIB)
    assert allocator.reserved == 180 * MIB
    assert allocator.allocated == 180 * MIB


def test_at_the_devices_end_free_memory_is_given_back_before_more_is_taken() -> None:
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable, capacity=100 * MIB)
        allocator.free(allocator.malloc(60 * MIB))
        allocator.malloc(80 * MIB)
        assert allocator.most_reserved <= 100 * MIB
        allocator.malloc(40 * MIB)
        assert allocator.most_reserved >= 120 * MIB, "what cannot be had shows as more than there is"


def test_what_was_given_back_counts_again_where_it_is_used() -> None:
    allocator = CachingAllocator(expandable=True, capacity=100 * MIB)
    keys = [allocator.malloc(40 * MIB), allocator.malloc(20 * MIB), allocator.malloc(40 * MIB)]
    allocator.free(keys[0])
    allocator.malloc(60 * MIB)  # behind the others, with the memory of the first
    assert (allocator.allocated, allocator.reserved) == (120 * MIB, 120 * MIB)
    allocator.free(keys[1])
    allocator.malloc(40 * MIB)  # where the first was
    assert allocator.reserved >= allocator.allocated == 140 * MIB


@pytest.mark.parametrize(("expandable", "capacity"), [(False, None), (True, None), (True, 2**30)])
def test_any_order_keeps_blocks_apart_and_counts_right(expandable: bool, capacity: int | None) -> None:
    draw = random.Random(0)
    allocator = CachingAllocator(expandable=expandable, capacity=capacity)
    sizes: dict[int, int] = {}
    for _ in range(4000):
        if sizes and draw.random() < 0.5:
            key = draw.choice(list(sizes))
            allocator.free(key)
            del sizes[key]
        else:
            size = int(2 ** draw.uniform(5, 27))
            sizes[allocator.malloc(size)] = size
        assert sum(sizes.values()) <= allocator.allocated <= allocator.reserved <= allocator.most_reserved
    for key in sizes:
        allocator.free(key)
    assert allocator.allocated == 0
    most = allocator.most_reserved
    allocator.malloc(allocator.reserved // 4)
    assert allocator.most_reserved == most or not expandable or capacity, "all free blocks of a segment are one"
