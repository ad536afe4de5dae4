"""When two runs differ in sizes alone."""

from zerotune.trial_lib.messages.foreseen_run import ForeseenRun, MemoryEvent, Moment, Storage
from zerotune.trial_lib.plan.scaling import have_same_events, scaled_run


def run_of(micro_batch, *freed, kind=0, empty=0):
    """Two storages that grow and one that may be empty are made in one moment, and freed in the next."""
    sizes = (10 * micro_batch, 20, empty)
    events = [(0, 1), (1, 1), (2, 1), *((storage, 0) for storage in freed)]
    return ForeseenRun(
        world=2,
        micro_batch=micro_batch,
        storages=tuple(Storage(size, kind if index == 2 else 0, 0) for index, size in enumerate(sizes)),
        events=tuple(MemoryEvent(*event) for event in events),
        moments=(Moment(0, 0, 0, 0, 0), Moment(2, 1, 0, 3, 0)),
    )


def test_a_size_between_two_runs_follows_from_both():
    between = scaled_run(run_of(2, 0, 1), larger=run_of(6, 0, 1), micro_batch=4)
    assert [each.size for each in between.storages] == [40, 20, 0]


def test_the_order_in_which_a_set_is_emptied_does_not_matter():
    assert have_same_events(run_of(2, 0, 1), run_of(6, 1, 0))


def test_it_matters_what_is_freed():
    assert not have_same_events(run_of(2, 0), run_of(6, 1))
    assert not have_same_events(run_of(2, 0), run_of(6, 0, 1))


def test_empty_storages_do_not_matter():
    assert have_same_events(run_of(2, 0, 2), run_of(6, 0, 2, kind=6))
    assert not have_same_events(run_of(2, 0, 2, empty=1), run_of(6, 0, 2, kind=6))
