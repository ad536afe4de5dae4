"""Reduction of gradients: buckets, overlap, and the way of the sum."""

from dataclasses import replace
from typing import Any

from trial_lib.deepspeed_config.gradient_sums import is_bf16_with_32_bit_sums
from trial_lib.space.effects import STAGE_1_2, STAGE_3, Effect, KnownKnob, Surroundings, clamped, switch
from trial_lib.space.known_knobs.offload import OFFLOAD_OPTIMIZER, OFFLOADED

_BUCKETS = (1_000_000_000, 100_000_000, 50_000_000, 10_000_000, 1_000_000)
_PIPELINE = "pipeline parallelism does not overlap communication"


def _copied(here: Surroundings, own: Any) -> tuple[bool, ...]:
    # The copy of gradients keeps a CUDA allocator's memory in one piece. A CPU does not need that.
    return switch(here.device == "cuda")(here, own)


def _buckets(here: Surroundings, own: Any) -> tuple[int, ...]:
    # DeepSpeed allocates a whole bucket, whether the model fills it or not.
    return clamped(own or 500_000_000, (500_000_000, *_BUCKETS), here.num_params)


def _is_no_pipeline(here: Surroundings) -> bool:
    return not here.pipeline


def _sums_rank_by_rank(here: Surroundings) -> bool:
    return here.own("zero_optimization.use_multi_rank_bucket_allreduce") is False


def _of_zeros_own(effect: Effect) -> tuple[Effect, ...]:
    """Returns an effect of the optimizer of stages 1 and 2, which DeepSpeed does not use for some of stage 1.

    `engine._do_optimizer_sanity_check`: bf16 that accumulates in fp32, without offload, uses `BF16_Optimizer`. It has
    no buckets and nothing to overlap.
    """

    def holds(here: Surroundings) -> bool:
        return not is_bf16_with_32_bit_sums(here.base_config) and (effect.holds is None or effect.holds(here))

    said = "at stage 1 bf16 that accumulates in fp32 has an optimizer of its own, which does not read it"
    of_1 = replace(effect, stages=(1,), holds=holds, otherwise=effect.otherwise or said)
    offloaded = replace(effect, stages=(1,), when={**effect.when, OFFLOAD_OPTIMIZER: OFFLOADED})
    kept = () if OFFLOAD_OPTIMIZER in effect.when else (offloaded,)
    return (of_1, *kept, replace(effect, stages=(2,)))


REDUCTION: dict[str, KnownKnob] = {
    "zero_optimization.reduce_bucket_size": KnownKnob(
        "count",
        # Stage 0 sums in its own buckets: engine.py buffered_allreduce_fallback.
        (
            *_of_zeros_own(Effect(f"{STAGE_1_2} setup_buckets", (1, 2), candidates=_buckets)),
            Effect(f"{STAGE_3} ipg_buckets", (3,), candidates=_buckets),
        ),
        word="bucket",
    ),
    "zero_optimization.allgather_bucket_size": KnownKnob(
        "count",
        (
            Effect(
                "utils.py all_gather_dp_groups",
                (1, 2),
                holds=lambda here: False,
                otherwise="with torch 1.13 or later DeepSpeed gathers each partition whole",
            ),
        ),
        word="gather-bucket",
    ),
    "zero_optimization.overlap_comm": KnownKnob(
        "switch",
        (
            *_of_zeros_own(
                Effect(
                    f"{STAGE_1_2} reduction_stream",
                    (1, 2),
                    ("cuda",),
                    replicas=2,
                    holds=_is_no_pipeline,
                    otherwise=_PIPELINE,
                    candidates=switch(False),
                )
            ),
            Effect(f"{STAGE_3} reduce_and_partition_stream", (3,), ("cuda",), replicas=2, candidates=switch(True)),
            # A CPU has no streams to overlap. The setting only allocates a second bucket there.
            Effect(f"{STAGE_1_2} setup_buckets", (1, 2), ("cpu",), holds=_is_no_pipeline, otherwise=_PIPELINE),
        ),
        word="overlap",
    ),
    "zero_optimization.reduce_scatter": KnownKnob(
        "switch",
        # Without contiguous_gradients it has no effect.
        (
            # Otherwise allreduce_and_scatter also sums whole buckets, and both engines communicate alike.
            Effect(
                f"{STAGE_1_2} average_tensor",
                (1, 2),
                replicas=2,
                holds=_sums_rank_by_rank,
                otherwise="whole buckets are summed either way, while use_multi_rank_bucket_allreduce is on",
                candidates=switch(True),
            ),
            Effect(f"{STAGE_3} __reduce_and_partition_ipg_grads", (3,), replicas=2, candidates=switch(True)),
        ),
        word="reduce-scatter",
    ),
    "zero_optimization.contiguous_gradients": KnownKnob(
        "switch",
        (
            # Offloading the optimizer turns it on.
            *_of_zeros_own(
                Effect(f"{STAGE_1_2} setup_buckets", (1, 2), when={OFFLOAD_OPTIMIZER: ("none",)}, candidates=_copied)
            ),
            Effect(f"{STAGE_3} __add_grad_to_ipg_bucket", (3,), candidates=switch(True)),
        ),
        word="contiguous",
    ),
    "zero_optimization.round_robin_gradients": KnownKnob(
        "switch",
        (
            # zero/config.py: made for CPU offloading.
            Effect(
                f"{STAGE_1_2} _round_robin_reorder",
                (1, 2),
                replicas=2,
                when={OFFLOAD_OPTIMIZER: OFFLOADED},
                candidates=switch(False),
            ),
            Effect(f"{STAGE_1_2} _round_robin_reorder", (1, 2), replicas=2),
        ),
        word="round-robin",
    ),
}
