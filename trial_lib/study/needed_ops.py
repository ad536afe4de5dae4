"""The operators of DeepSpeed that a study needs: assumed before the profile trial, and known after it."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from trial_lib.device.this_host import kind_of
from trial_lib.inputs.read_experiment import Experiment
from trial_lib.inputs.search_space import read_search_space
from trial_lib.messages.errors import InputError
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.search.arms import build_space, surroundings_of
from trial_lib.search.catalogue import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from trial_lib.search.effects import Surroundings
from trial_lib.search.knobs import Arm, SearchSpace, get_knob
from trial_lib.search.methods import METHODS
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.program import KnownProgram
from trial_lib.study.setup import StudySetup

# DeepSpeed's compiled operators, by the names of their builders, and the ones that a configuration needs.


SHARED_MEMORY = "ShareMemCommBuilder"
"""The operator of the collectives on a CPU."""

_ADAMS = ("adam", "adamw", "muon")
# deepspeed/runtime/engine.py _configure_basic_optimizer, by whether the optimizer is offloaded.
_OF_AN_OPTIMIZER = {
    **{name: {False: "FusedAdamBuilder", True: "CPUAdamBuilder"} for name in _ADAMS},
    "adagrad": {True: "CPUAdagradBuilder"},
    "lamb": {False: "FusedLambBuilder", True: "FusedLambBuilder"},
    "lion": {False: "FusedLionBuilder", True: "CPULionBuilder"},
}
# runtime/zero/partition_parameters.py CUDAQuantizer, runtime/comm/coalesced_collectives.py all_to_all_quant_reduce.
_QUANTIZED = (
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_gradients",
)
_OFFLOADED = ("cpu", "nvme")


def ops_of(config: Mapping[str, Any], *, code_has_optimizer: bool = False, unless_named: str = "") -> tuple[str, ...]:
    """The operators that DeepSpeed loads for a configuration. Those that the code loads itself are not known.

    An optimizer that the code makes is used instead of one in the configuration. `unless_named` is the optimizer type
    to assume if the configuration names none.
    """
    ops = []
    named = "" if code_has_optimizer else get_knob(config, "optimizer.type", unless_named)
    by_offload = _OF_AN_OPTIMIZER.get(str(named or "").lower(), {})
    is_offloaded = get_knob(config, OFFLOAD_OPTIMIZER) in _OFFLOADED or _offloads_as_once(config)
    if is_offloaded in by_offload and get_knob(config, "optimizer.params.torch_adam") is not True:
        ops.append(by_offload[is_offloaded])
    if "nvme" in (get_knob(config, OFFLOAD_OPTIMIZER), get_knob(config, OFFLOAD_PARAM)):
        ops.append("AsyncIOBuilder")
    if any(get_knob(config, path) is True for path in _QUANTIZED):
        ops.append("QuantizerBuilder")
    return tuple(ops)


def _offloads_as_once(config: Mapping[str, Any]) -> bool:
    # Whether the optimizer is offloaded by DeepSpeed's first key for it, which still works.
    return get_knob(config, "zero_optimization.cpu_offload") is True


def shown_op(builder: str) -> str:
    """The usual name of an operator, such as `CPUAdam`."""
    return builder.removesuffix("Builder")


# The size of a model that is not known yet. No operator depends on it.
_PARAMETERS = 10**9
# If the configuration is in the code, the profile trial shows the optimizer. Usually it is this one.
_USUAL_OPTIMIZER = "adam"


def own_ops(experiment: Experiment, device: str) -> list[str]:
    """The operators that the user's configuration needs."""
    config = experiment.ds_config
    ops = ops_of(config, unless_named="" if config else _USUAL_OPTIMIZER)
    return [*([SHARED_MEMORY] if kind_of(device).computes_on_the_processor else []), *ops]


def supposed_ops(experiment: Experiment, arguments: StudyArguments, device: str) -> list[str]:
    """The operators that the trials of a study may need, as far as is known before the profile trial."""
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

    The result then names those that cannot be built. `build` is `Place.build`.
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
    """The configurations that a study may try, some of which may need an operator that cannot be built.

    Raises InputError if the experiment's `search_space` cannot be used.
    """
    here = surroundings_of(profiled, base_config, setup.slots, setup.device)
    requests = read_search_space(setup.experiment.config.search_space)
    has_catalogue = METHODS[setup.arguments.method].has_catalogue
    return build_space(setup.arguments.zero_stages, here, requests, catalogue=has_catalogue)


def without_unbuildable(
    space: SearchSpace, base_config: Mapping[str, Any], profiled: TrialResult
) -> tuple[SearchSpace, list[str]]:
    """Returns a space without the arms whose operators cannot be built, and a sentence for each operator.

    Operators of the user's configuration do not count, because its trials show what is wrong. The space stays whole if
    no arm would be left.
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
    return [(arm, ops_of(overwrite_deepspeed_config(base_config, arm.knobs), **known)) for arm in space.arms]


def _has_optimizer(profiled: TrialResult) -> bool:
    return profiled.program is not None and profiled.program.optimizer != ""
