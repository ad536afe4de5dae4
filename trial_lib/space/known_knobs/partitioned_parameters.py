"""Parameters that stage 3 partitions: which are gathered, when, and in what groups."""

from typing import Any

from trial_lib.space.effects import STAGE_3, Effect, KnownKnob, Surroundings, ValuesOf, clamped


def _prefetched(here: Surroundings, own: Any) -> tuple[int, ...]:
    first = 50_000_000 if own is None else own
    return clamped(first, (50_000_000, 500_000_000, 5_000_000, 0), here.num_params)


def _live(here: Surroundings, own: Any) -> tuple[int, ...]:
    most = min(1_000_000_000, here.num_params)
    return clamped(most if own is None else own, (most, most // 4), here.num_params)


def _persistent(here: Surroundings, own: Any) -> tuple[int, ...]:
    return clamped(100_000 if own is None else own, (100_000, 1_000_000, 10_000), here.num_params)


def _sub_groups(here: Surroundings, own: Any) -> tuple[int, ...]:
    shard = here.trainable_num_params // here.replicas
    return clamped(own or 1_000_000_000, (1_000_000_000, max(1, shard // 4)), here.num_params)


def _stage_3(word: str, source: str, candidates: ValuesOf) -> KnownKnob:
    return KnownKnob("count", (Effect(source, (3,), candidates=candidates),), word=word)


PARTITIONED_PARAMETERS: dict[str, KnownKnob] = {
    "zero_optimization.stage3_prefetch_bucket_size": _stage_3(
        "prefetch", "zero/partitioned_param_coordinator.py fetch_sub_module", _prefetched
    ),
    "zero_optimization.stage3_param_persistence_threshold": _stage_3(
        "persistence", "zero/parameter_offload.py mark_persistent_parameters", _persistent
    ),
    "zero_optimization.stage3_max_live_parameters": _stage_3(
        "live", "zero/partitioned_param_coordinator.py fetch_sub_module", _live
    ),
    "zero_optimization.sub_group_size": _stage_3("sub-group", f"{STAGE_3} _create_fp16_sub_groups", _sub_groups),
}
