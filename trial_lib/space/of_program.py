"""The search space of one program: a method's own, with what the user asks for in the place of its knobs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trial_lib.records.result import ModelProfile, ProgramProfile
from trial_lib.space.arms import RequestedKnob, build_space, stages_not_tried, without_effect
from trial_lib.space.effects import Surroundings
from trial_lib.space.knobs import SearchSpace


def space_for(
    zero_stages: Iterable[int],
    profile: ModelProfile,
    base_config: Mapping[str, Any],
    slots: int,
    device: str,
    requests: Sequence[RequestedKnob],
    *,
    catalogue: bool,
    deepspeed: str = "",
    program: ProgramProfile | None = None,
) -> SearchSpace:
    """Returns what a method searches: its own space, with what the user asks for in the place of its knobs.

    Args:
        zero_stages: the stages that may be used, unless the section names others.
        profile: what the profile trial found out.
        base_config: the user's DeepSpeed configuration.
        slots: devices a trial takes.
        device: `cpu` or `cuda`.
        requests: what the experiment's `search_space` asks for.
        catalogue: whether the method searches the catalogue's knobs, see `Method`.
        deepspeed: the version of DeepSpeed that the ranks have; empty where it is not known.
        program: what the profile trial found out about the user's program; None where that is not known.
    """
    here = _surroundings(profile, base_config, slots, device, deepspeed, program)
    return build_space(zero_stages, here, requests, catalogue=catalogue)


def left_out_of_space(
    zero_stages: Iterable[int],
    profile: ModelProfile,
    base_config: Mapping[str, Any],
    slots: int,
    device: str,
    requests: Sequence[RequestedKnob],
    *,
    catalogue: bool,
    deepspeed: str = "",
    program: ProgramProfile | None = None,
) -> list[str]:
    """Returns one sentence for each knob of the requests that no candidate has, and each reason that keeps stages out.

    Args: as for `space_for`.
    """
    here = _surroundings(profile, base_config, slots, device, deepspeed, program)
    told = [f"search_space: {said}" for said in without_effect(zero_stages, here, requests, catalogue=catalogue)]
    return told + stages_not_tried(zero_stages, here, requests) if catalogue else told


def _surroundings(
    profile: ModelProfile,
    base_config: Mapping[str, Any],
    slots: int,
    device: str,
    deepspeed: str,
    program: ProgramProfile | None,
) -> Surroundings:
    program = program or ProgramProfile()
    return Surroundings(
        device=device,
        slots=slots,
        replicas=profile.data_parallel_size,
        num_params=profile.num_params,
        trainable_num_params=profile.trainable_num_params,
        base_config=base_config,
        pipeline=profile.pipeline_parallel,
        reads_activation_checkpointing=program.reads_activation_checkpointing,
        deepspeed=deepspeed,
        code_optimizer=program.optimizer,
        by_accelerate=program.by_accelerate,
        has_experts=program.has_experts,
        repeats_backward=program.repeats_backward,
    )
