import random
from dataclasses import replace

import pytest

from zerotune.trial_lib.messages.foreseen_run import (
    KINDS,
    MOMENTS,
    ForeseenRun,
    MemoryEvent,
    Moment,
    Operation,
    Storage,
)
from zerotune.trial_lib.plan.device_memory import live_bytes
from zerotune.trial_lib.plan.fits import by_size
from zerotune.trial_lib.plan.scaling import scaled_run


def run_of(micro_batch: int, world: int = 8, seed: int = 3) -> ForeseenRun:
    """Returns a run whose storages are a fixed part, a part for each sample, and a share of the world."""
    draw = random.Random(seed)
    storages, events, live = [], [], []
    for number in range(200):
        fixed, of_sample, share = draw.choice([(4, 0, 0), (0, 3, 0), (0, 1, 0), (0, 0, 64), (2, 2, 0)])
        size = 512 * (fixed * draw.randrange(1, 9) + of_sample * micro_batch + share * 8 // world)
        storages.append(Storage(size, draw.randrange(7), 0))
        events.append(MemoryEvent(number, 1))
        live.append(number)
        while len(live) > 5 + draw.randrange(40):
            events.append(MemoryEvent(live.pop(draw.randrange(len(live))), 0))
    cuts = [0, len(events) // 3, len(events) // 2]
    names = ("forward", "backward", "update")
    return ForeseenRun(
        world=world,
        replicas=world,
        micro_batch=micro_batch,
        storages=tuple(storages),
        events=tuple(events),
        moments=tuple(Moment(MOMENTS.index(name), 1, 0, cut, 0) for name, cut in zip(names, cuts, strict=True)),
        operations=(Operation(0, 0, 10.0 * micro_batch, 4.0 + micro_batch), Operation(11, 0, 0.0, 64.0, ranks=world)),
    )


@pytest.mark.parametrize("seed", range(5))
def test_two_sizes_give_every_other_size_exactly(seed: int) -> None:
    found = by_size(run_of(1, seed=seed), run_of(2, seed=seed))
    for size in (1, 2, 3, 7, 40):
        expected = live_bytes(run_of(size, seed=seed))
        assert [(each.peak, each.at_begin, each.at_end) for each in found.at(size).moments] == [
            (each.peak, each.at_begin, each.at_end) for each in expected.moments
        ]
        assert found.at(size).peak == expected.peak
        assert all(sum(each.by_kind) == pytest.approx(each.peak) for each in found.at(size).moments)


def test_the_event_of_the_peak_changes_with_the_size() -> None:
    """So one line through two peaks would be wrong, and the envelope is not."""
    found = by_size(run_of(1), run_of(2))
    assert len({found.moments[0].at(size).event for size in (1, 2, 3, 7, 40)}) > 1


def test_runs_with_other_events_give_a_line_by_moment() -> None:
    small, large = run_of(1), run_of(3)
    other = replace(large, events=large.events[:-1])
    found = by_size(small, other)
    assert found.at(1).by_name() == live_bytes(small).by_name()
    assert found.at(3).by_name() == live_bytes(other).by_name()


def step_of(micro_batch: int, accumulation: int) -> ForeseenRun:
    """Returns a step whose first of two micro-batches keeps a gradient, and whose last reduces all."""
    storages: list[Storage] = []
    events: list[MemoryEvent] = []
    moments: list[Moment] = []

    def make(kind: str, size: int) -> int:
        storages.append(Storage(512 * size, KINDS.index(kind), 0))
        events.append(MemoryEvent(len(storages) - 1, 1))
        return len(storages) - 1

    def begin(name: str, number: int = 0) -> None:
        moments.append(Moment(MOMENTS.index(name), 0 if name == "initialize" else 1, number, len(events), 0))

    begin("initialize")
    make("parameter", 100)
    kept = []
    for number in range(accumulation):
        begin("forward", number)
        held = [make("activation", size * micro_batch) for size in (5, 7, 11)]
        begin("backward", number)
        if number == accumulation - 1:
            bucket = make("buffer", 40)
        temporary = make("temporary", 13 * micro_batch)
        events.extend(MemoryEvent(index, 0) for index in (*held, temporary))
        kept.append(make("gradient", 60))
    events.append(MemoryEvent(bucket, 0))
    begin("update")
    make("optimizer", 200)
    events.extend(MemoryEvent(index, 0) for index in kept)
    return ForeseenRun(
        world=8,
        micro_batch=micro_batch,
        accumulation=accumulation,
        storages=tuple(storages),
        events=tuple(events),
        moments=tuple(moments),
    )


def test_a_step_of_one_micro_batch_beside_a_step_of_two() -> None:
    found = by_size(step_of(2, 2), step_of(4, 1))
    for size, accumulation in ((1, 2), (2, 2), (3, 2), (4, 1), (8, 1), (64, 1)):
        expected = live_bytes(step_of(size, accumulation))
        assert found.at(size).moments == expected.moments, size
        assert found.at(size).peak == expected.peak


def test_moments_of_one_name_keep_their_places_if_the_runs_have_other_events() -> None:
    """Of the moments between others, one holds the gradients and the next does not."""

    def cut(run: ForeseenRun) -> ForeseenRun:
        names = ("between", "forward", "between", "update")
        cuts = [place * len(run.events) // 4 for place in range(4)]
        moments = (Moment(MOMENTS.index(name), 1, 0, at, 0) for name, at in zip(names, cuts, strict=True))
        return replace(run, moments=tuple(moments))

    small, large = cut(run_of(1)), cut(run_of(3))
    other = replace(large, events=large.events[:-1])
    found = by_size(small, other)
    for size, run in ((1, small), (3, other)):
        expected = [(each.name, each.peak) for each in live_bytes(run).moments]
        assert expected[0] != expected[2]
        assert [(each.name, each.peak) for each in found.at(size).moments] == expected


def test_one_run_gives_the_same_bytes_for_all_sizes() -> None:
    assert by_size(run_of(2)).at(9).peak == live_bytes(run_of(2)).peak
    with pytest.raises(ValueError, match="same micro_batch"):
        by_size(run_of(2), run_of(2))


def test_a_run_of_another_size_and_world_is_the_run_that_it_stands_for() -> None:
    made = scaled_run(run_of(1, 8), larger=run_of(2, 8), wider=run_of(1, 16), micro_batch=6, world=64)
    # The work of a step is `at_size`'s and `at_world`'s.
    assert made == replace(run_of(6, 64), operations=run_of(1, 8).operations)


def test_a_run_of_another_size_needs_a_second_one() -> None:
    with pytest.raises(ValueError, match="needs a second run"):
        scaled_run(run_of(1), micro_batch=2)
    with pytest.raises(ValueError, match="same world"):
        scaled_run(run_of(1), wider=run_of(1), world=2)
    with pytest.raises(ValueError, match="other events"):
        scaled_run(run_of(1), larger=run_of(2, seed=4), micro_batch=3)
