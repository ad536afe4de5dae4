from itertools import pairwise

import pytest

from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun, MemoryEvent, Moment, Storage
from zerotune.trial_lib.plan.arm_bytes import host_peak
from zerotune.trial_lib.plan.fits import GIB, ArmMemory, communication, interval, outside_pytorch, workspaces

MIB = 2**20


def run_of(micro_batch: int, states: int = 20 * GIB, world: int = 8) -> ForeseenRun:
    """Returns a run with states, and 2 GiB of activations for each sample."""
    storages = (
        Storage(states, KINDS.index("parameter"), 0),
        Storage(2 * GIB * micro_batch, KINDS.index("activation"), 0),
        Storage(3 * GIB, KINDS.index("optimizer"), PLACES.index("pinned")),
    )
    events = tuple(MemoryEvent(*each) for each in ((0, 1), (2, 1), (1, 1), (1, 0)))
    moments = (Moment(MOMENTS.index("initialize"), 0, 0, 0, 0), Moment(MOMENTS.index("forward"), 1, 0, 2, 0))
    return ForeseenRun(world=world, micro_batch=micro_batch, storages=storages, events=events, moments=moments)


ARM = ArmMemory(one=run_of(1), other=run_of(2))


def test_each_figure_of_memory_contains_the_one_before() -> None:
    found = ARM.at(10)
    of_cublas = sum(workspaces())
    assert found.live.peak == 40 * GIB
    assert found.allocated.mean == pytest.approx(40 * GIB + of_cublas, rel=1e-3)
    assert found.allocated.mean <= found.needed.mean <= found.shown.mean
    assert found.shown.mean - found.reserved.mean == pytest.approx(outside_pytorch(8, 8).mean)
    low, high = interval(found.allocated)
    assert low < 40 * GIB < high


def test_the_probability_falls_with_the_size_and_grows_with_the_device() -> None:
    chances = [ARM.at(size).fits(80 * GIB) for size in (10, 26, 29, 32, 60)]
    assert all(larger < smaller for smaller, larger in pairwise(chances))
    assert chances[0] > 0.999
    assert chances[-1] < 0.001
    assert ARM.at(29).fits(90 * GIB) > ARM.at(29).fits(80 * GIB)


def test_nccl_needs_more_memory_for_more_ranks_and_as_much_for_one_as_for_two() -> None:
    means = [communication(*case).mean for case in ((1, 8), (2, 8), (8, 8), (64, 8))]
    assert means[0] == means[1] > 0
    assert means == sorted(means)
    assert outside_pytorch(8, 8, loads_all_kernels=True).mean > outside_pytorch(8, 8).mean


def test_pinned_blocks_are_powers_of_two_and_stay() -> None:
    pinned = PLACES.index("pinned")
    run = ForeseenRun(
        world=1,
        storages=(
            Storage(3 * MIB, 2, pinned),
            Storage(5 * MIB, 2, pinned),
            Storage(4 * MIB, 2, pinned),
            Storage(7, 2, 1),
        ),
        events=tuple(MemoryEvent(*each) for each in ((0, 1), (0, 0), (1, 1), (1, 0), (2, 1), (3, 1))),
        moments=(Moment(MOMENTS.index("forward"), 1, 0, 0, 0),),
        data_bytes=100,
    )
    found = host_peak(run)
    # The block of the first serves the third. That of the second is as large as 8 MiB, and torch keeps it.
    assert (found.pageable, found.pinned, found.pinned_blocks) == (7, 8 * MIB, 12 * MIB)
    assert found.held == 12 * MIB + 107


def test_the_host_keeps_what_stays_after_a_model_was_built_there() -> None:
    host, initialize, forward = PLACES.index("host"), MOMENTS.index("initialize"), MOMENTS.index("forward")
    run = ForeseenRun(
        world=1,
        storages=(Storage(16 * GIB, 0, host), Storage(3 * GIB, 2, host)),
        # The model goes to the device when the engine is made. Offloaded states stay.
        events=tuple(MemoryEvent(*each) for each in ((0, 1), (0, 0), (1, 1))),
        moments=(Moment(initialize, 0, 0, 0, 0), Moment(forward, 1, 0, 3, 0)),
    )
    found = host_peak(run)
    assert (found.held, found.built) == (3 * GIB, 16 * GIB)
