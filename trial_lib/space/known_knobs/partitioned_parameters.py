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


def _leaf_modules(key: str) -> dict[str, KnownKnob]:
    """Returns a list of modules that stage 3 gathers whole. Only the user knows which modules there are."""
    known = KnownKnob("names", (Effect(f"zero/leaf_module_config.py {key}", (3,)),), since="0.18.0", word=f"leaf-{key}")
    return {f"zero_optimization.leaf_module.{key}": known}


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
    # Useful values depend on the modules: the parameters of a module over its inner modules (parameter_offload.py).
    "zero_optimization.stage3_module_granularity_threshold": KnownKnob(
        "count",
        (Effect("zero/parameter_offload.py _set_z3_leaf_modules_by_threshold", (3,)),),
        since="0.16.0",
        word="granularity",
    ),
    **_leaf_modules("classes"),
    **_leaf_modules("names"),
    **_leaf_modules("name_suffixes"),
}
