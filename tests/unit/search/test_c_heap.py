"""The C library's heap. The sequences are those that a real process has shown, address by address."""

import pytest

from zerotune.trial_lib.plan.arm_bytes import MAPPED_FROM, CHeap

MIB = 2**20
SLACK = 4096


def heap_after(*changes: int) -> CHeap:
    """Returns the heap after allocations of so many MiB; minus n frees the n-th of them."""
    heap, made = CHeap(), 0
    for change in changes:
        if change > 0:
            made += 1
            heap.allocate(made, change * MIB)
        else:
            heap.free(-change)
    return heap


def test_a_heap_grows_at_its_end() -> None:
    assert 5 * MIB <= heap_after(2, 3).held <= 5 * MIB + SLACK


def test_the_end_shrinks_with_its_last_block() -> None:
    assert heap_after(2, 3, -2).held <= 2 * MIB + SLACK


def test_a_hole_has_no_room_for_another_aligned_block_of_its_size() -> None:
    # A convolution's result lies behind the copy from which it was made, and the next one does not take its place.
    assert heap_after(3, 3, -1, 3).held >= 9 * MIB


def test_two_neighbouring_holes_have_room_for_one_block() -> None:
    assert heap_after(3, 3, 3, -1, -2, 3).held <= 9 * MIB + SLACK
    assert heap_after(3, 3, 3, -1, -2, 3, 3).held >= 12 * MIB


def test_smaller_blocks_fill_the_smallest_hole_that_fits() -> None:
    # Holes of 6 and of 3 MiB. The block of 2 goes into the smaller one, so 5 find room as well.
    assert heap_after(6, 1, 3, 1, -1, -3, 2, 5).held <= 11 * MIB + SLACK


def test_a_large_block_is_mapped_and_given_back() -> None:
    heap = CHeap()
    heap.allocate(1, MIB)
    heap.allocate(2, MAPPED_FROM)
    assert heap.held >= MAPPED_FROM + MIB
    heap.free(2)
    assert heap.held <= MIB + SLACK


def test_what_was_never_allocated_frees_nothing() -> None:
    heap = heap_after(1)
    held = heap.held
    heap.free(7)
    assert heap.held == held


@pytest.mark.parametrize("size", [0, 1, 8, 63, 64, 100, 4096])
def test_small_blocks_take_little_more_than_their_size(size: int) -> None:
    heap = CHeap()
    for handle in range(1000):
        heap.allocate(handle, size)
    assert 1000 * size <= heap.held <= 1000 * (size + 160)


def test_all_that_is_freed_can_be_used_again() -> None:
    heap = CHeap()
    for handle in range(50):
        heap.allocate(handle, (handle % 7 + 1) * 1000)
    held = heap.held
    for handle in range(50):
        heap.free(handle)
    assert heap.held == 0
    heap.allocate(100, held // 2)
    assert heap.held <= held
