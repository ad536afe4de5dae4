"""Known sequences, as `c10/cuda/CUDACachingAllocator.cpp` of PyTorch answers them."""

import random

import pytest

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.device_memory import AllocatorSettings, CachingAllocator

MIB = 2**20
GROWING = AllocatorSettings(expandable_segments=True)


def test_a_small_request_is_packed_into_a_segment_of_2_mib() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(1, 1)
    assert allocator.allocate(2, MIB)
    assert (allocator.allocated, allocator.reserved) == (512 + MIB, 2 * MIB)
    # There is not enough left for one more MiB.
    assert allocator.allocate(3, MIB)
    assert allocator.reserved == 4 * MIB


@pytest.mark.parametrize(
    ("request_mib", "segment_mib"), [(1.5, 20), (9.5, 20), (10, 10), (10.5, 12), (21, 22), (100, 100)]
)
def test_the_segment_of_a_large_request(request_mib: float, segment_mib: int) -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(1, request_mib * MIB)
    assert allocator.reserved == segment_mib * MIB


def test_a_large_block_keeps_a_rest_of_up_to_1_mib() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 11 * MIB)
    # The segment has 12 MiB. The rest of 1 MiB is not split off, so it counts as in use.
    assert (allocator.allocated, allocator.reserved) == (12 * MIB, 12 * MIB)


def test_a_freed_block_is_used_again_and_split() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 100 * MIB)
    allocator.free(1)
    allocator.allocate(2, 60 * MIB)
    allocator.allocate(3, 40 * MIB)
    assert (allocator.allocated, allocator.reserved) == (100 * MIB, 100 * MIB)


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 100 * MIB)
    allocator.allocate(2, 50 * MIB)
    allocator.free(1)
    allocator.free(2)
    allocator.allocate(3, 50 * MIB)
    allocator.allocate(4, 100 * MIB)
    assert allocator.reserved == 150 * MIB


def test_free_neighbours_are_merged() -> None:
    allocator = CachingAllocator()
    for handle in range(3):
        allocator.allocate(handle, 6 * MIB)
    assert allocator.reserved == 20 * MIB
    for handle in (0, 2, 1):
        allocator.free(handle)
    assert allocator.allocate(3, 18 * MIB)
    assert allocator.reserved == 20 * MIB


def test_pieces_of_segments_are_of_no_use_to_a_larger_request() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 30 * MIB)
    allocator.allocate(2, 30 * MIB)
    allocator.free(1)
    allocator.free(2)
    allocator.allocate(3, 40 * MIB)
    assert (allocator.allocated, allocator.reserved) == (40 * MIB, 100 * MIB)


def test_a_full_device_gets_its_unsplit_segments_back() -> None:
    allocator = CachingAllocator(limit=64 * MIB)
    allocator.allocate(1, 30 * MIB)
    allocator.allocate(2, 30 * MIB)
    allocator.free(1)
    assert allocator.allocate(3, 34 * MIB)
    assert (allocator.reserved, allocator.retries) == (64 * MIB, 1)
    assert not allocator.allocate(4, 2 * MIB)


def test_a_split_segment_cannot_be_given_back() -> None:
    allocator = CachingAllocator(limit=64 * MIB)
    allocator.allocate(1, 40 * MIB)
    allocator.free(1)
    allocator.allocate(2, 8 * MIB)
    assert not allocator.allocate(3, 34 * MIB)
    assert allocator.allocate(3, 32 * MIB)


def test_segments_that_grow_leave_no_pieces() -> None:
    allocator = CachingAllocator(GROWING)
    for handle in (1, 2):
        allocator.allocate(handle, 30 * MIB)
    assert allocator.reserved == 60 * MIB
    allocator.free(1)
    allocator.free(2)
    allocator.allocate(3, 70 * MIB)
    assert (allocator.allocated, allocator.reserved) == (70 * MIB, 80 * MIB)


def test_segments_that_grow_give_back_pages_from_their_middle() -> None:
    allocator = CachingAllocator(GROWING, limit=120 * MIB)
    for handle in (1, 2, 3):
        allocator.allocate(handle, 40 * MIB)
    allocator.free(2)
    allocator.free(1)
    assert allocator.allocate(4, 80 * MIB)
    assert (allocator.reserved, allocator.retries) == (120 * MIB, 0)
    allocator.free(4)
    assert allocator.allocate(5, 30 * MIB)
    # The pages of the first 80 MiB that are free move behind the third block.
    assert not allocator.allocate(6, 70 * MIB)
    assert allocator.allocate(6, 40 * MIB)


def test_a_block_beyond_the_largest_split_size_is_not_split() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_size=64 * MIB))
    allocator.allocate(1, 100 * MIB)
    allocator.free(1)
    allocator.allocate(2, 30 * MIB)
    assert allocator.reserved == 130 * MIB
    # A request that is nearly as large may have the whole block.
    allocator.allocate(3, 90 * MIB)
    assert (allocator.allocated, allocator.reserved) == (130 * MIB, 130 * MIB)


@pytest.mark.parametrize(("request_bytes", "rounded"), [(1200, 1536), (2100, 2560), (4096, 4096), (4097, 5120)])
def test_requests_are_rounded_to_divisions_of_a_power_of_two(request_bytes: int, rounded: int) -> None:
    assert AllocatorSettings(roundup_power2_divisions=((0, 4),)).rounded(request_bytes) == rounded


def test_the_variable_is_read() -> None:
    read = AllocatorSettings.parse("max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:8]")
    assert read.max_split_size == 128 * MIB
    assert read.roundup_power2_divisions == ((256, 1), (512, 2), (1024, 8))
    assert AllocatorSettings.parse("garbage_collection_threshold:0.8,expandable_segments:True").expandable_segments
    with pytest.raises(InputError, match="max_split_size_mb:lots"):
        AllocatorSettings.parse("max_split_size_mb:lots")


def test_the_newer_name_of_the_variable_counts_if_both_are_set() -> None:
    old, new = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert AllocatorSettings.of_environment({}) == AllocatorSettings()
    assert AllocatorSettings.of_environment(old).max_split_size == 32 * MIB
    assert AllocatorSettings.of_environment({**old, **new}) == GROWING


@pytest.mark.parametrize("settings", [AllocatorSettings(), GROWING, AllocatorSettings(max_split_size=32 * MIB)])
def test_blocks_are_never_lost(settings: AllocatorSettings) -> None:
    """Whatever is allocated and freed: in the end every byte is free again, in whole segments."""
    draw = random.Random(7)
    allocator = CachingAllocator(settings, limit=2048 * MIB)
    live: list[int] = []
    for handle in range(3000):
        if live and draw.random() < 0.48:
            allocator.free(live.pop(draw.randrange(len(live))))
        elif allocator.allocate(handle, draw.choice([300, 70_000, 900_000, 3 * MIB, 17 * MIB, 90 * MIB])):
            live.append(handle)
        assert allocator.allocated <= allocator.reserved <= 2048 * MIB
    assert allocator.retries
    for handle in live:
        allocator.free(handle)
    allocator.release_cached()
    assert (allocator.allocated, allocator.reserved) == (0, 0)
