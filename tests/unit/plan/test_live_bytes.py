from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun, MemoryEvent, Moment, Storage
from zerotune.trial_lib.plan.device_memory import live_bytes, rounded


def storage(size: int, kind: str, place: str = "device") -> Storage:
    return Storage(size, KINDS.index(kind), PLACES.index(place))


def moment(name: str, step: int, event: int) -> Moment:
    return Moment(MOMENTS.index(name), step, 0, event, 0)


RUN = ForeseenRun(
    world=1,
    storages=(
        storage(1024, "parameter"),
        storage(600, "activation"),
        storage(1024, "gradient"),
        storage(4096, "optimizer"),
        storage(3000, "optimizer", "pinned"),
    ),
    events=tuple(MemoryEvent(*each) for each in ((0, 1), (4, 1), (1, 1), (2, 1), (1, 0), (3, 1), (2, 0))),
    moments=(
        moment("initialize", 0, 0),
        moment("forward", 1, 2),
        moment("backward", 1, 3),
        moment("update", 1, 5),
    ),
)


def test_each_moment_has_its_peak_and_what_it_leaves() -> None:
    live = live_bytes(RUN)
    assert live.by_name() == {"initialize": 1024, "forward": 2048, "backward": 3072, "update": 6144}
    backward = live.highest_of("backward")
    assert backward is not None
    assert backward.split == {"parameter": 1024, "gradient": 1024, "activation": 1024}
    assert (backward.at_begin, backward.at_end, backward.event) == (2048, 2048, 3)
    assert live.highest is live.highest_of("update")
    assert live.peak == 6144


def test_pinned_memory_is_counted_apart_and_rounded_to_a_power_of_two() -> None:
    assert live_bytes(RUN, "pinned").peak == 4096
    assert live_bytes(RUN, "host").peak == 0
    assert [rounded(size, "device") for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_a_run_without_events_has_no_peak() -> None:
    assert live_bytes(ForeseenRun(world=1)).highest is None
    assert live_bytes(ForeseenRun(world=1)).peak == 0
