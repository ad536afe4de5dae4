"""What bounds a study's candidates before any is measured: sizes, room on disks, and operators that cannot be built."""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS, Layout
from zerotune.trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config, resolve_batch
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import ModelProfile, ProgramProfile
from zerotune.trial_lib.records.candidate import FrozenRecord
from zerotune.trial_lib.records.result import Outcome, SwapDisk, TrialResult
from zerotune.trial_lib.records.units import bytes_shown
from zerotune.trial_lib.search.allocations import host_bytes
from zerotune.trial_lib.search.arms import build_space, surroundings_of
from zerotune.trial_lib.search.catalogue import NVME_PATHS, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from zerotune.trial_lib.search.effects import Surroundings
from zerotune.trial_lib.search.knobs import Arm, SearchSpace, get_knob
from zerotune.trial_lib.search.methods import METHODS
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.program import KnownProgram
from zerotune.trial_lib.study.setup import StudySetup

# The largest micro-batch that a study may try: what the global batch, the data and the user leave.


class SizeLimit(FrozenRecord):
    size: int  # the largest, in samples
    by: str  # what sets it, as a noun


def size_limit(
    arguments: StudyArguments, base_config: Mapping[str, Any], profile: ModelProfile, program: ProgramProfile | None
) -> SizeLimit | None:
    """The lowest limit of all; None if the data's length is not known and nothing else is a limit."""
    limits = []
    with contextlib.suppress(InputError):
        batch = _own_batch(arguments, base_config, profile)
        if batch is not None:
            limits.append(SizeLimit(size=max(1, batch // profile.data_parallel_size), by="the global batch"))
    of_data = largest_of_data(base_config, profile, program)
    if of_data is not None:
        limits.append(SizeLimit(size=of_data, by="the length of the data"))
    if arguments.max_micro_batch is not None:
        limits.append(SizeLimit(size=arguments.max_micro_batch, by="--max-micro-batch"))
    return min(limits, key=lambda limit: limit.size, default=None)


def largest_of_data(
    base_config: Mapping[str, Any], profile: ModelProfile, program: ProgramProfile | None
) -> int | None:
    """The samples that one rank's data have; None if that is not known.

    An arm with fewer replicas than the profile trial gives each of them more, at most all.
    """
    if program is None or program.samples_per_epoch is None or program.typed_batch is None:
        return None
    shares = profile.data_parallel_size if base_config.get(LAYOUTS) else 1
    return max(program.samples_per_epoch * shares, program.typed_batch.micro_batch_size)


def kept_batch(
    arguments: StudyArguments, base_config: Mapping[str, Any], profile: ModelProfile, log: logging.Logger
) -> int | None:
    """The global batch, in samples, that every candidate keeps; None if it is free, or not known."""
    try:
        return _own_batch(arguments, base_config, profile)
    except InputError as error:
        log.warning(
            "the global batch is not kept, because its size is not known. --train-batch-size sets it. %s", error
        )
        return None


def _own_batch(arguments: StudyArguments, base_config: Mapping[str, Any], profile: ModelProfile) -> int | None:
    if not METHODS[arguments.method].has_batch_policy or arguments.free_batch:
        return None
    return arguments.train_batch_size or resolve_batch(base_config, profile.data_parallel_size).train_batch_size


# The arms that the disks below `nvme_path` have room for.

RESERVE = 0.1  # share of the disk's free room that stays free, because a full disk stops whoever writes there


def with_swap_disks(profiled: TrialResult, setup: StudySetup) -> TrialResult:
    """Adds to the result of a profile trial the free room of the disks to which arms may swap.

    A resumed study reads it there, so that its search has the same arms. The disks of other hosts are not known.
    """
    elsewhere = setup.experiment.config.resources.hosts or setup.arguments.ray_address is not None
    if elsewhere or profiled.outcome is not Outcome.COMPLETED or profiled.program is None:
        return profiled
    base_config = KnownProgram.of(setup.experiment).learned(profiled.program).base_config
    disks: dict[int, SwapDisk] = {}
    for path in dict.fromkeys(_paths(base_config, setup)):
        # A disk that cannot be looked at leaves nothing out.
        with contextlib.suppress(OSError):
            device, free = _looked_at((setup.experiment.model_dir / path).absolute())
            others = disks[device].paths if device in disks else []
            disks[device] = SwapDisk(paths=[*others, path], free=free)
    return replace(profiled, swap_disks=list(disks.values()))


def without_disk_room(
    space: SearchSpace,
    base_config: Mapping[str, Any],
    profiled: TrialResult,
    slots: int,
    has_run: Callable[[Arm], bool] = lambda arm: False,
) -> tuple[SearchSpace, list[str]]:
    """Returns a space without the arms that would fill a disk, and sentences on them.

    The space stays whole if no arm would be left. An arm that `has_run` here stays. `slots` are a trial's on this host.
    """

    def written(arm: Arm, disk: SwapDisk) -> float:
        assert profiled.profile is not None
        config = overwrite_deepspeed_config(base_config, arm.knobs)
        of_rank = host_bytes(config, profiled.profile, slots, accumulates=False, profiled=Layout.of(base_config))
        sizes = of_rank.optimizer_on_disk, of_rank.params_on_disk
        paths = (str(get_knob(config, path)) for path in NVME_PATHS)
        return slots * sum(size for size, path in zip(sizes, paths, strict=True) if path in disk.paths)

    kept, said = list(space.arms), []
    for disk in profiled.swap_disks:
        sizes = {arm.label: written(arm, disk) for arm in kept if not has_run(arm)}
        cannot = {label: size for label, size in sizes.items() if size > (1 - RESERVE) * disk.free}
        kept = [arm for arm in kept if arm.label not in cannot]
        if cannot:
            said.append(_not_tried(cannot, disk))
    if not said:
        return space, []
    if not kept:
        paths = " and ".join(path for disk in profiled.swap_disks for path in disk.paths)
        return space, [f"No arm seems to have room on the disk below {paths}. So all of them are tried."]
    return SearchSpace.of_arms(kept), said


def _not_tried(sizes: Mapping[str, float], disk: SwapDisk) -> str:
    shown = " and ".join(dict.fromkeys(map(bytes_shown, sorted({min(sizes.values()), max(sizes.values())}))))
    return (
        f"Not tried, because they would write {shown} below {' and '.join(disk.paths)}, whose disk had "
        f"{bytes_shown(disk.free)} free after the profile trial ({RESERVE:.0%} of it stays free): {', '.join(sizes)}."
    )


def _paths(base_config: Mapping[str, Any], setup: StudySetup) -> Iterator[str]:
    # The NVMe devices that the user's configuration names, or that `search_space` does.
    yield from (str(path) for each in NVME_PATHS if (path := get_knob(base_config, each)))
    requests = [request for request in setup.experiment.requests if request.path in NVME_PATHS]
    yield from (str(path) for request in requests for path in request.values if path)


def _looked_at(path: Path) -> tuple[int, int]:
    """The device that a folder is on, or would be on once it is made, and its free bytes."""
    there = next(each for each in (path, *path.parents) if each.exists())
    return there.stat().st_dev, shutil.disk_usage(there).free


# DeepSpeed's compiled operators, by the names of their builders, and the ones that a configuration needs.

_SHARED_MEMORY = "ShareMemCommBuilder"  # of the collectives on a CPU
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


def ops_of(config: Mapping[str, Any], *, code_has_optimizer: bool = False, unless_named: str = "") -> tuple[str, ...]:
    """The operators that DeepSpeed loads for a configuration. Those that the code loads itself are not known.

    An optimizer that the code makes is used instead of one in the configuration. `unless_named` is the optimizer type
    to assume if the configuration names none.
    """
    ops = []
    named = "" if code_has_optimizer else get_knob(config, "optimizer.type", unless_named)
    by_offload = _OF_AN_OPTIMIZER.get(str(named or "").lower(), {})
    # DeepSpeed's first key for offload still works.
    by_first_key = get_knob(config, "zero_optimization.cpu_offload") is True
    is_offloaded = by_first_key or get_knob(config, OFFLOAD_OPTIMIZER) in ("cpu", "nvme")
    if is_offloaded in by_offload and get_knob(config, "optimizer.params.torch_adam") is not True:
        ops.append(by_offload[is_offloaded])
    if "nvme" in (get_knob(config, OFFLOAD_OPTIMIZER), get_knob(config, OFFLOAD_PARAM)):
        ops.append("AsyncIOBuilder")
    if any(get_knob(config, path) is True for path in _QUANTIZED):
        ops.append("QuantizerBuilder")
    return tuple(ops)


# The size of a model that is not known yet. No operator depends on it.
_PARAMETERS = 10**9
# If the configuration is in the code, the profile trial shows the optimizer. Usually it is this one.
_USUAL_OPTIMIZER = "adam"


def own_ops(experiment: Experiment, device: str) -> list[str]:
    """The operators that the user's configuration needs."""
    config = experiment.ds_config
    ops = ops_of(config, unless_named="" if config else _USUAL_OPTIMIZER)
    return [*([_SHARED_MEMORY] if kind_of(device).computes_on_the_processor else []), *ops]


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
    has_catalogue = METHODS[arguments.method].has_catalogue
    space = build_space(arguments.zero_stages, here, experiment.requests, catalogue=has_catalogue)
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
        return replace(profiled, unbuildable={op: why for op, why in cannot.items() if op in ops})
    return profiled


def study_space(setup: StudySetup, base_config: Mapping[str, Any], profiled: TrialResult) -> SearchSpace:
    """The configurations that a study may try, even if an operator of one cannot be built."""
    here = surroundings_of(profiled, base_config, setup.slots, setup.device)
    stages, requests = setup.arguments.zero_stages, setup.experiment.requests
    return build_space(stages, here, requests, catalogue=setup.method.has_catalogue)


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
                f"Not tried, because DeepSpeed's {op.removesuffix('Builder')} cannot be built here "
                f"({why.rstrip('. ')}): {', '.join(arms)}. `zerotune doctor` says what is missing."
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
