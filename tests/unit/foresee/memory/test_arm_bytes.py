from dataclasses import replace

import pytest

from trial_lib.foresee.memory.arm_bytes import foreseen_arm
from trial_lib.memory.foreseen_bytes import SizeLine
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun, MemoryEvent, Moment, Storage

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


def test_a_processor_has_one_memory_for_states_and_data() -> None:
    arm = foreseen_arm([run_of(2, 100 * K), run_of(8, 100 * K)], "cpu")
    assert arm is not None
    assert arm.backward == SizeLine((30 + 3 + 100) * K, 4 * K)
    assert arm.update == SizeLine((30 + 3 + 100) * K)
    assert arm.host == 0


def test_one_size_shows_a_samples_activations() -> None:
    arm = foreseen_arm([run_of(2)], "cuda")
    assert arm is not None
    assert arm.backward == SizeLine(30 * K, 4 * K)
    assert arm.update == SizeLine(30 * K)


@pytest.mark.parametrize("runs", [[], [replace(run_of(2), stopped="no")], [replace(run_of(2), moments=())]])
def test_a_run_without_a_step_foresees_no_arm(runs: list[ForeseenRun]) -> None:
    assert foreseen_arm(runs, "cuda") is None
