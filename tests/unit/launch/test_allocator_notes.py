"""What is said of an allocator that had to make room, or that holds much in pieces."""

import pytest

from zerotune.trial_lib.launch.trial import allocator_note
from zerotune.trial_lib.messages.measurement import Memory

GIB = 2**30
# The second rank has 20 GiB in pieces, of 80.
IN_PIECES = Memory(peak_reserved=[60 * GIB, 70 * GIB], steps_peak=[58 * GIB, 50 * GIB], least_free=[20 * GIB, 10 * GIB])


def test_of_a_cpu_and_of_a_device_with_room_nothing_is_said() -> None:
    assert allocator_note(Memory(peak=[1], after_initialize=[1]), {}) == ""
    roomy = Memory(peak_reserved=[60 * GIB], steps_peak=[58 * GIB], least_free=[20 * GIB], counted_retries=[0])
    assert allocator_note(roomy, {}) == ""


def test_retries_are_told_with_what_they_mean() -> None:
    note = allocator_note(Memory(counted_retries=[0, 2], allocator_retries=[5, 7]), {})
    assert note.startswith("CUDA's allocator had to empty its cache 2 times in the measured steps")


def test_much_that_lies_in_pieces_is_told_with_the_remedy() -> None:
    note = allocator_note(IN_PIECES, {})
    assert note == (
        "20.0 GiB of the device (25%) were reserved and held no tensor at the peak: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may make them usable."
    )


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_remedy_is_not_told_to_who_has_it(name: str) -> None:
    assert allocator_note(IN_PIECES, {name: "max_split_size_mb:128,expandable_segments:True"}) == ""
