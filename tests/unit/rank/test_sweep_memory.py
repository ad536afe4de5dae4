"""Whether the next size of a sweep is foreseen to fit."""

from types import SimpleNamespace
from typing import Any

import pytest

from zerotune.trial_lib.messages.measurement import Memory
from zerotune.trial_lib.messages.orders import SizeMemory, foreseen, will_fit
from zerotune.trial_lib.rank.session import SweepSession

MIB = 2**20


def sizes(*taken: tuple[int, int], available: int | None = 1000 * MIB) -> list[SizeMemory]:
    return [SizeMemory(samples, mib * MIB, available) for samples, mib in taken]


def test_after_one_size_the_estimate_says_what_a_sample_takes() -> None:
    assert foreseen(sizes((4, 100)), 8, bytes_per_sample=10 * MIB) == 140 * MIB


def test_the_most_that_a_sample_may_take_is_what_the_smallest_size_leaves_for_it() -> None:
    assert foreseen(sizes((4, 100)), 8, bytes_per_sample=90 * MIB) == 200 * MIB


def test_after_two_sizes_a_straight_line_does() -> None:
    assert foreseen(sizes((4, 100), (8, 180)), 16, bytes_per_sample=5 * MIB) == 340 * MIB


def test_an_estimate_that_is_too_high_is_put_right_by_what_was_measured() -> None:
    assert foreseen(sizes((4, 40), (8, 80)), 16, bytes_per_sample=50 * MIB) == 160 * MIB


def test_small_sizes_below_the_peak_of_the_optimizers_step_do_not_hide_the_activations() -> None:
    # The step takes 100 MiB whatever the batch; a sample's activations take 20.
    assert foreseen(sizes((1, 100), (2, 100)), 8, bytes_per_sample=20 * MIB) == 160 * MIB
    assert foreseen(sizes((4, 100), (8, 160)), 16, bytes_per_sample=20 * MIB) == 320 * MIB


def test_memory_that_shrinks_is_not_foreseen_to_go_on_shrinking() -> None:
    assert foreseen(sizes((4, 100), (8, 90)), 16, bytes_per_sample=0.0) == 90 * MIB


@pytest.mark.parametrize(("headroom", "fits"), [(0.0, True), (0.1, True), (0.2, False)])
def test_the_headroom_stays_free(headroom: float, fits: bool) -> None:
    # 16 samples take 860 MiB of 1000.
    assert will_fit(sizes((4, 260), (8, 460)), 16, 0.0, headroom) is fits


def test_the_least_that_was_ever_available_counts() -> None:
    measured = [*sizes((4, 260), available=800 * MIB), *sizes((8, 460))]
    assert not will_fit(measured, 16, 0.0, headroom=0.0)


def test_without_a_bound_everything_fits() -> None:
    assert will_fit(sizes((4, 260), available=None), 10**6, 10.0 * MIB, headroom=0.05)


def next_will_fit(**used: int) -> bool:
    """Asks a rank that has measured its first size, of 4 samples, about the next, of 8."""
    rank: Any = object.__new__(SweepSession)
    rank.probe = SimpleNamespace(on_most_demanding_rank=lambda values: values)
    ordered = [SimpleNamespace(overrides={"train_micro_batch_size_per_gpu": size}) for size in (4, 8)]
    rank._position, rank._measured = 0, []
    rank._order = SimpleNamespace(sizes=ordered, bytes_per_sample=10.0, headroom=0.0)
    figures = {"after_initialize": 100, "available": 300, **used}
    return bool(rank._next_will_fit(Memory(**{name: [figure] for name, figure in figures.items()})))


def test_a_group_goes_by_what_its_steps_took_where_initialisation_took_more() -> None:
    assert not next_will_fit(peak=400)
    assert next_will_fit(peak=400, steps_peak=200)


def test_a_group_ends_where_an_allocator_had_to_make_room() -> None:
    assert next_will_fit(peak=200, counted_retries=0)
    assert not next_will_fit(peak=200, counted_retries=1)
