from dataclasses import replace

import pytest

from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun, MemoryEvent, Moment, Storage
from zerotune.trial_lib.plan.arm_bytes import foreseen_arm
from zerotune.trial_lib.search.allocations import SizeLine

K = 1024


def run_of(micro_batch: int, data_bytes: int = 0) -> ForeseenRun:
    """Two steps: parameters of 10 K stay, activations of 4 K a sample do not, and an offloaded state has 3 K."""
    sizes = [
        (10, "parameter", "device"),
        (4 * micro_batch, "activation", "device"),
        (10, "gradient", "device"),
        (20, "optimizer", "device"),
        (3, "optimizer", "pinned"),
    ]
    lives = [(0, 1), (1, 1), (2, 1), (1, 0), (3, 1), (4, 1), (2, 0), (1, 1), (2, 1), (1, 0), (2, 0)]
    begins = [("initialize", 0, 0), ("forward", 1, 1), ("backward", 1, 2), ("update", 1, 4)]
    again = [("forward", 2, 7), ("backward", 2, 8), ("update", 2, 10)]
    return ForeseenRun(
        world=2,
        micro_batch=micro_batch,
        ds_config={"zero_optimization": {"stage": 1}},
        storages=tuple(Storage(size * K, KINDS.index(kind), PLACES.index(place)) for size, kind, place in sizes),
        events=tuple(MemoryEvent(*life) for life in lives),
        moments=tuple(Moment(MOMENTS.index(name), step, 0, event, 0) for name, step, event in (*begins, *again)),
        data_bytes=data_bytes,
    )


def test_moments_count_above_initialisation_and_grow_by_the_sample() -> None:
    arm = foreseen_arm([run_of(8), run_of(2)], "cuda")
    assert arm is not None
    assert arm.initialize == SizeLine(10 * K)
    # Of the second step, when states lie beside activations and gradients.
    assert arm.backward == SizeLine(30 * K, 4 * K)
    assert arm.update == SizeLine(30 * K)
    assert arm.host == 4 * K
    assert arm.ds_config == {"zero_optimization": {"stage": 1}}


def test_what_grows_with_the_square_of_the_micro_batch_does_so_at_other_sizes() -> None:
    def with_pairs(micro_batch: int) -> ForeseenRun:
        run = run_of(micro_batch)
        storages = [each._replace(size=each.size // micro_batch * micro_batch**2) for each in run.storages[1:2]]
        return replace(run, storages=(run.storages[0], *storages, *run.storages[2:]))

    arm = foreseen_arm([with_pairs(2), with_pairs(6)], "cuda")
    assert arm is not None
    assert arm.backward == SizeLine(30 * K, 0.0, 4 * K)


def test_a_processor_has_one_memory_for_states_and_data() -> None:
    arm = foreseen_arm([run_of(2, 100 * K), run_of(8, 100 * K)], "cpu")
    assert arm is not None
    # The library adds its headers, and cannot fill every hole.
    assert arm.backward.constant == pytest.approx((30 + 3 + 100) * K, abs=8 * K)
    assert arm.backward.per_sample == pytest.approx(4 * K, abs=K)
    assert arm.update == SizeLine((30 + 3 + 100) * K)
    assert arm.host == 0


def with_kernels(run: ForeseenRun, place: str) -> ForeseenRun:
    """The same with a block as large as the activations, which each forward pass takes before and frees after them."""
    (block,) = (storage for storage in run.storages if storage.kind == KINDS.index("activation"))
    number = len(run.storages)
    events = list(run.events)
    for place_of_event in reversed([index for index, event in enumerate(events) if event == (1, 1)]):
        events[place_of_event : place_of_event + 1] = [(number, 1), (1, 1), (number, 0)]
    moved = [moment._replace(event=moment.event + 2 * (moment.event > 1)) for moment in run.moments]
    moved = [moment._replace(event=moment.event + 2 * (moment.step == 2 and moment.name != 2)) for moment in moved]
    return replace(
        run,
        storages=(*run.storages, block._replace(kind=KINDS.index("temporary"), place=PLACES.index(place))),
        events=tuple(MemoryEvent(*event) for event in events),
        moments=tuple(moved),
    )


def test_the_holes_of_a_heap_count() -> None:
    plain, through_blocks = (
        foreseen_arm([change(run_of(size), "processor") for size in (200, 800)], "cpu")
        for change in (lambda run, _: run, with_kernels)
    )
    assert plain is not None
    assert through_blocks is not None
    # The activations lie behind the hole of the block, into which the next ones do not fit.
    assert through_blocks.backward.per_sample > 1.5 * plain.backward.per_sample


def test_what_kernels_of_a_processor_take_is_not_on_a_gpu() -> None:
    plain, through_blocks = (
        foreseen_arm([change(run_of(size), "processor") for size in (2, 8)], "cuda")
        for change in (lambda run, _: run, with_kernels)
    )
    assert plain == through_blocks


def test_the_heap_of_the_thread_that_gathers_stays() -> None:
    runs = [run_of(size) for size in (2, 8)]
    gathering = [
        replace(
            run,
            storages=(*run.storages, Storage(500 * K, KINDS.index("temporary"), PLACES.index("thread"))),
            events=(*run.events, MemoryEvent(5, 1), MemoryEvent(5, 0)),
            moments=(*run.moments, Moment(MOMENTS.index("forward"), 3, 0, len(run.events), 0)),
        )
        for run in runs
    ]
    plain, gathered = foreseen_arm(runs, "cpu"), foreseen_arm(gathering, "cpu")
    assert plain is not None
    assert gathered is not None
    assert gathered.backward.at(4) >= 500 * K
    assert plain.backward.at(4) < 100 * K


def test_one_size_shows_a_samples_activations() -> None:
    arm = foreseen_arm([run_of(2)], "cuda")
    assert arm is not None
    assert arm.backward == SizeLine(30 * K, 4 * K)
    assert arm.update == SizeLine(30 * K)


@pytest.mark.parametrize("runs", [[], [replace(run_of(2), stopped="no")], [replace(run_of(2), moments=())]])
def test_a_run_without_a_step_foresees_no_arm(runs: list[ForeseenRun]) -> None:
    assert foreseen_arm(runs, "cuda") is None
