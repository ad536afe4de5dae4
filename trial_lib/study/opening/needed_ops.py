"""The operators of DeepSpeed that a study needs: assumed before the profile trial, and known after it."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from trial_lib.device.host.this_host import kind_of
from trial_lib.experiment.read_experiment import Experiment
from trial_lib.experiment.search_space_section import read_search_space
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.search.methods import METHODS
from trial_lib.space.arms import build_space
from trial_lib.space.effects import Surroundings
from trial_lib.space.knobs import Arm, SearchSpace
from trial_lib.space.of_program import surroundings_of
from trial_lib.space.ops import SHARED_MEMORY, ops_of, shown_op
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.known_program import KnownProgram
from trial_lib.study.setup import StudySetup
from trial_lib.wire.errors import InputError

# The size of a model that is not known yet. No operator depends on it.
_PARAMETERS = 10**9
# If the configuration is in the code, the profile trial shows the optimizer. Usually it is this one.
_USUAL_OPTIMIZER = "adam"


def own_ops(experiment: Experiment, device: str) -> list[str]:
    """Returns the operators that the user's configuration needs.

    Args:
        experiment: what the user submitted.
        device: `cuda` or `cpu`.
    """
    config = experiment.ds_config
    ops = ops_of(config, unless_named="" if config else _USUAL_OPTIMIZER)
    return [*([SHARED_MEMORY] if kind_of(device).computes_on_the_processor else []), *ops]


def supposed_ops(experiment: Experiment, arguments: StudyArguments, device: str) -> list[str]:
    """Returns the operators that the trials of a study may need, as far as is known before the profile trial.

    Args:
        experiment: what the user submitted.
        arguments: the study's.
        device: `cuda` or `cpu`.
    """
    slots = experiment.config.resources.slots_per_trial
    here = Surroundings(
        device=device,
        slots=slots,
        replicas=slots,
        num_params=_PARAMETERS,
        trainable_num_params=_PARAMETERS - 1,
        base_config=experiment.ds_config,
        hosts=max(1, len(experiment.config.resources.hosts)),
    )
    requests = read_search_space(experiment.config.search_space)
    space = build_space(arguments.zero_stages, here, requests, catalogue=METHODS[arguments.method].has_catalogue)
    unless_named = "" if experiment.ds_config else _USUAL_OPTIMIZER
    of_arms = _by_arm(space, experiment.ds_config, unless_named=unless_named)
    return list(dict.fromkeys([*own_ops(experiment, device), *(op for _, ops in of_arms for op in ops)]))


def with_ops_built(
    profiled: TrialResult, setup: StudySetup, build: Callable[[Sequence[str]], dict[str, str]]
) -> TrialResult:
    """Builds the operators that the arms of a study need, as the profile trial shows them, and waits.

    Args:
        profiled: the result of the profile trial.
        setup: the study's.
        build: as `Place.build`.

    Returns:
        The result, with the operators that cannot be built.
    """
    if profiled.outcome is not Outcome.COMPLETED or profiled.profile is None or profiled.program is None:
        return profiled
    base_config = KnownProgram.of(setup.experiment, setup.environment).learned(profiled.program).base_config
    # A wrong space is reported where the search opens.
    with contextlib.suppress(InputError):
        space = study_space(setup, base_config, profiled)
        ops = {op for _, ops in _known_by_arm(space, base_config, profiled) for op in ops}
        cannot = build(sorted(ops))
        return profiled.model_copy(update={"unbuildable": {op: why for op, why in cannot.items() if op in ops}})
    return profiled


def study_space(setup: StudySetup, base_config: Mapping[str, Any], profiled: TrialResult) -> SearchSpace:
    """Returns the configurations that a study may try. Some may need an operator that cannot be built.

    Args:
        setup: the study's.
        base_config: the user's DeepSpeed configuration, as far as it is known.
        profiled: the profile trial, which has completed.

    Raises:
        InputError: the experiment's `search_space` cannot be used.
    """
    here = surroundings_of(profiled, base_config, setup.slots, setup.device)
    requests = read_search_space(setup.experiment.config.search_space)
    has_catalogue = METHODS[setup.arguments.method].has_catalogue
    return build_space(setup.arguments.zero_stages, here, requests, catalogue=has_catalogue)


def without_unbuildable(
    space: SearchSpace, base_config: Mapping[str, Any], profiled: TrialResult
) -> tuple[SearchSpace, list[str]]:
    """Returns a space without the arms whose operators cannot be built, and a sentence for each such operator.

    Operators of the user's configuration do not count, because its trials show what is wrong. The space stays whole if
    no arm would be left.

    Args:
        space: the configurations that a study may try.
        base_config: the user's DeepSpeed configuration, as far as it is known.
        profiled: the profile trial.
    """
    own = ops_of(base_config, code_has_optimizer=_has_optimizer(profiled))
    cannot = {op: why for op, why in profiled.unbuildable.items() if op not in own}
    needed = _known_by_arm(space, base_config, profiled)
    kept = [arm for arm, ops in needed if not set(ops) & cannot.keys()]
    if not kept or len(kept) == len(space.arms):
        return space, []
    told = []
    for op, why in cannot.items():
        arms = [arm.label for arm, ops in needed if op in ops]
        if arms:
            told.append(
                f"Not tried, because DeepSpeed's {shown_op(op)} cannot be built here ({why.rstrip('. ')}): "
                f"{', '.join(arms)}. `zerotune doctor` says what is missing."
            )
    return SearchSpace.of_arms(kept), told


def _known_by_arm(
    space: SearchSpace, base_config: Mapping[str, Any], profiled: TrialResult
) -> list[tuple[Arm, tuple[str, ...]]]:
    return _by_arm(space, base_config, code_has_optimizer=_has_optimizer(profiled))


def _by_arm(space: SearchSpace, base_config: Mapping[str, Any], **known: Any) -> list[tuple[Arm, tuple[str, ...]]]:
    """Returns the arms, each with the operators that it needs."""
    return [(arm, ops_of(overwrite_deepspeed_config(base_config, arm.knobs), **known)) for arm in space.arms]


def _has_optimizer(profiled: TrialResult) -> bool:
    return profiled.program is not None and profiled.program.optimizer != ""
