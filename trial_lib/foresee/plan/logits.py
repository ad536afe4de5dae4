"""The share of logits in a peak. People look for it, because a large vocabulary can be most of the memory. Pure."""

from trial_lib.foresee.memory.live_bytes import MomentPeak
from trial_lib.foresee.memory.rounding import rounded
from trial_lib.wire.foreseen_run import KINDS, OPERATIONS, PLACES, ForeseenRun

_LOSS, _DEVICE = OPERATIONS.index("loss"), PLACES.index("device")
_MAY_BE = [KINDS.index(kind) for kind in ("activation", "temporary", "gradient")]
# An operation of the loss reads logits and writes as much, in one precision or the other. So logits are between a
# quarter and the whole of what the largest such operation moves, and nothing else of a model is nearly as large.
_LEAST, _MOST = 0.2, 1.05


def with_logits(peak: MomentPeak, run: ForeseenRun, micro_batch: int) -> dict[str, float]:
    """Returns the bytes of a peak by kind, with `logits` as a kind of its own.

    Args:
        peak: of a moment of the run, at the micro-batch.
        run: with the events that the peak refers to, at any micro-batch.
        micro_batch: samples.
    """
    split = dict(zip(KINDS, peak.by_kind, strict=True))
    moved = max((each.moved for each in run.operations if each.kind == _LOSS), default=0.0)
    if moved <= 0:
        return {kind: size for kind, size in split.items() if size > 0}
    live: set[int] = set()
    for event in run.events[: peak.event + 1]:
        if event.is_made:
            live.add(event.storage)
        else:
            live.discard(event.storage)
    split["logits"] = 0.0
    for storage in (run.storages[index] for index in live):
        if storage.place == _DEVICE and storage.kind in _MAY_BE and _LEAST * moved <= storage.size <= _MOST * moved:
            kind = KINDS[storage.kind]
            size = min(split[kind], rounded(storage.size, "device") * micro_batch / max(1, run.micro_batch))
            split[kind] -= size
            split["logits"] += size
    return {kind: size for kind, size in split.items() if size > 0}
