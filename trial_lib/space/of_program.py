"""The search space of one program, from its profile trial or from its foreseen run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trial_lib.command.switches import place_of, shown_switch
from trial_lib.records.result import ProgramProfile, TrialResult
from trial_lib.space.arms import RequestedKnob, not_known, stages_not_tried, without_effect
from trial_lib.space.effects import Surroundings, shown
from trial_lib.space.known_knobs.layout import layouts_not_tried
from trial_lib.wire.foreseen_run import ForeseenRun
from trial_lib.wire.turned import TURNED, is_turned


def surroundings_of(profiled: TrialResult, base_config: Mapping[str, Any], slots: int, device: str) -> Surroundings:
    """Returns the facts that decide which knobs have an effect on a program.

    Args:
        profiled: the profile trial, which has completed.
        base_config: the user's DeepSpeed configuration.
        slots: devices of a trial.
        device: `cpu` or `cuda`.
    """
    profile, program = profiled.profile, profiled.program or ProgramProfile()
    assert profile is not None
    return _surroundings(
        program,
        profiled.versions,
        device=device,
        slots=slots,
        replicas=profile.data_parallel_size,
        num_params=profile.num_params,
        trainable_num_params=profile.trainable_num_params,
        base_config=base_config,
        pipeline=profile.pipeline_parallel,
        shape=replace(profile.shape, sequence_length=_fixed_length(program)),
    )


def foreseen_surroundings(typed: ForeseenRun, base_config: Mapping[str, Any], device: str) -> Surroundings:
    """Returns the facts that decide which knobs have an effect on a program that has not run yet.

    Nothing is known of the shape of its model, so no rule of divisibility is broken.

    Args:
        typed: the foreseen run of the program as it was typed.
        base_config: the user's DeepSpeed configuration.
        device: `cpu` or `cuda`.
    """
    return _surroundings(
        ProgramProfile(**typed.program),
        typed.versions,
        device=device,
        slots=typed.world,
        replicas=typed.replicas,
        num_params=typed.parameters,
        trainable_num_params=typed.trainable,
        base_config=base_config,
        pipeline=typed.is_pipeline,
    )


def _surroundings(program: ProgramProfile, versions: Mapping[str, str], **of_model: Any) -> Surroundings:
    return Surroundings(
        **of_model,
        reads_activation_checkpointing=program.reads_activation_checkpointing,
        deepspeed=versions.get("deepspeed", ""),
        code_optimizer=program.optimizer,
        by_accelerate=program.by_accelerate,
        has_experts=program.has_experts,
        by_autoep=program.by_autoep,
        repeats_backward=program.repeats_backward,
        compiles_engine=program.compiles_engine,
        turnable=program.turnable,
        not_turnable=program.not_turnable,
    )


def _fixed_length(program: ProgramProfile) -> int:
    """Returns the tokens of every sample; 0 if samples differ, or if that is not known."""
    longest = program.longest_sequence or 0
    return longest if longest == program.shortest_sequence else 0


def left_out_of_space(
    zero_stages: Iterable[int], here: Surroundings, requests: Sequence[RequestedKnob], *, catalogue: bool
) -> list[str]:
    """Returns one sentence for each request that nothing comes of, for each unknown one, and for ruled-out stages.

    Args: as for `build_space`.
    """
    told = [
        f"search_space: {said}"
        for said in (*without_effect(zero_stages, here, requests, catalogue=catalogue), *not_known(requests))
    ]
    told += values_not_tried(requests, here)
    told += layouts_not_tried({each.path: each.values for each in requests}, here)
    return told + stages_not_tried(zero_stages, here, requests) if catalogue else told


def values_not_tried(requests: Sequence[RequestedKnob], here: Surroundings) -> list[str]:
    """Returns one sentence for each requested value that the program cannot have of a switch that ZeroTune turns.

    A switch without any of the requested values is not among them. `without_effect` has its reason. Neither is one that
    was requested without values, because the program decides which it can have.
    """
    told = []
    for request in requests:
        place = place_of(request.path)
        if not is_turned(place):
            continue
        offered = here.turnable.get(place, ())
        missing = [value for value in request.values if value is not None and value not in offered]
        if 0 < len(missing) < len(request.values) and request.values != TURNED[place].values:
            known = ", ".join(map(shown, offered))
            told += [f"{shown_switch(place, value)} is not tried: your program can have {known}." for value in missing]
    return told
