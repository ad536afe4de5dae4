from dataclasses import replace

from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun, MemoryEvent, Moment, Storage
from zerotune.trial_lib.plan.device_memory import least_reserved, replay

MIB = 2**20


def storage(size: int, place: str = "device") -> Storage:
    return Storage(size, KINDS.index("temporary"), PLACES.index(place))


RUN = ForeseenRun(
    world=1,
    storages=(storage(30 * MIB), storage(30 * MIB), storage(40 * MIB), storage(500 * MIB, "host")),
    events=tuple(MemoryEvent(*each) for each in ((0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1))),
    moments=(Moment(MOMENTS.index("forward"), 1, 0, 0, 0), Moment(MOMENTS.index("update"), 1, 0, 4, 0)),
)


def test_a_replay_shows_what_is_reserved_beside_what_is_in_use() -> None:
    found = replay(RUN)
    assert (found.allocated, found.reserved) == (60 * MIB, 100 * MIB)


def test_a_full_device_empties_the_cache_first() -> None:
    found = replay(RUN, limit=64 * MIB)
    assert (found.failed_at, found.reserved) == (None, 60 * MIB)


def test_a_replay_ends_at_the_request_that_found_no_room() -> None:
    found = replay(RUN, limit=64 * MIB, before=[8 * MIB])
    assert found.failed_at == 1


def test_the_least_memory_is_below_what_an_endless_device_reserves() -> None:
    assert 60 * MIB <= least_reserved(RUN, replay(RUN), tries=8) < 62 * MIB


def test_the_least_memory_is_not_on_one_side_of_the_truth_if_it_is_tried_seldom() -> None:
    # The first try, 80 MiB, suffices. So the truth is between 60, which are in use, and 80.
    assert least_reserved(RUN, replay(RUN), tries=1) == 70 * MIB


def test_what_one_stream_frees_another_cannot_use() -> None:
    gathers = replace(
        RUN, storages=(*RUN.storages[:2], RUN.storages[2]._replace(size=30 * MIB, stream=1), RUN.storages[3])
    )
    computes = replace(gathers, storages=tuple(each._replace(stream=0) for each in gathers.storages))
    assert (replay(computes).reserved, replay(gathers).reserved) == (60 * MIB, 90 * MIB)
    # A full device gives back the segments of both.
    assert replay(gathers, limit=64 * MIB).reserved == 60 * MIB
