"""Plans of trials: a candidate becomes a `TrialPlan`, which says everything that decides the trial."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import Layout
from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    CONFIG,
    DEEPSPEED_KEYS,
    MICRO_BATCH,
    OVERWRITES,
    TRAIN_BATCH,
    config_hash,
    inline_ds_config,
    resolve_batch,
    with_open_batch,
)
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.inputs.accelerate import without_deepspeed
from zerotune.trial_lib.inputs.config import ExperimentConfig, Hyperparameters, Length
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import Arrival, ModelProfile
from zerotune.trial_lib.messages.orders import StepWindow, TrainingSpec
from zerotune.trial_lib.messages.secrets import redact
from zerotune.trial_lib.messages.turned import beside_kind, compiles, turned_among
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import FullExperimentPaths, TrialPaths
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult
from zerotune.trial_lib.records.switches import SwitchValue, deepspeed_part
from zerotune.trial_lib.search.allocations import host_bytes
from zerotune.trial_lib.search.methods import METHODS, MethodName
from zerotune.trial_lib.study.program import KnownProgram, program_of, varied_options
from zerotune.trial_lib.study.setup import StudySetup

# The deadline of a trial. A trial that runs longer hangs. Pure.


# Nothing is known before this trial. It may read a large model from a slow disk.
PROFILE_DEADLINE_S = 1800.0

_FLOOR_S = 120.0
_PATIENCE = 5.0
# The least throughput of a rank's host. It makes and locks pages at one to two gigabytes a second. A disk for all ranks
# is slower, and so is an update of offloaded states on few cores.
_HOST_BYTES_PER_S = 1e9
# Inductor compiles a model of some dozen layers in minutes. The profile trial has not compiled it.
_COMPILATION_S = 900.0


def deadline_s(
    profile: TrialResult, profiled: Candidate, candidate: Candidate, window: StepWindow, offloaded: float = 0.0
) -> float:
    """The deadline of a trial in seconds, from the times of the profile trial.

    It is a floor plus five times the start, with its first step, plus five times the window's first steps at the
    profile trial's time per sample. A trial within it may be slow. Filling and moving offloaded states (`offloaded`, in
    bytes of a rank) comes on top, because the profile trial did not show it. So does a compilation that a switch has
    turned on.
    """
    # The profile trial's start also contains the priming and the builds. Later trials do not pay for these.
    # Compilation happens in the first step of every trial.
    setup = sum(profile.phases.get(phase, 0.0) for phase in ("import", "initialize", "first_step"))
    samples = candidate.micro_batch_size * candidate.gradient_accumulation_steps
    profiled_samples = profiled.micro_batch_size * profiled.gradient_accumulation_steps
    step = profile.metrics["latency"] * samples / profiled_samples
    moving = offloaded / _HOST_BYTES_PER_S * (1 + window.end_step)
    compilation = _COMPILATION_S if compiles(candidate.switches) else 0.0
    return compilation + _FLOOR_S + _PATIENCE * (setup + step * window.end_step + window.max_seconds + moving)


# Sections of a DeepSpeed configuration that decide on number formats.
_PRECISION = {"amp", "bf16", "bfloat16", "data_types", "fp16", "torch_autocast"}


class TrialPlans:
    """Makes the plans of one study's trials."""

    def __init__(self, setup: StudySetup) -> None:
        self._setup = setup
        # Called repeatedly while a plan waits for the user's wrapper. Its error ends the waiting.
        self.check: Callable[[], None] = lambda: None

    def plan(
        self,
        number: int,
        purpose: Purpose,
        candidate: Candidate,
        known: KnownProgram,
        profiled: tuple[TrialResult, Candidate] | None,
        name: str = "",
    ) -> TrialPlan:
        """`profiled` is the profile trial and its candidate; None for the profile trial itself."""
        arguments = self._setup.arguments
        if profiled is None:
            window = StepWindow(start_step=1, end_step=1, max_steps=1)
            deadline = PROFILE_DEADLINE_S
        else:
            window = StepWindow(start_step=arguments.start_profile_step, end_step=arguments.end_profile_step)
            deadline = deadline_s(*profiled, candidate, window, self._offloaded(candidate, known, profiled[0]))
        paths = self._setup.paths.trial(number)
        # A profile at more than the typed size only shows whether the program follows.
        begins = not profiled and known.found and candidate.micro_batch_size > known.base_config[MICRO_BATCH]
        paths = paths.larger if begins else paths
        # The user's configuration runs as it was typed. Nothing is put together again.
        as_typed = purpose is Purpose.SUBMITTED
        model, program = (None, None) if profiled is None else (profiled[0].profile, profiled[0].program)
        # The losses of a confirming trial have to be those of the user's data.
        warms_up_longest = purpose is not Purpose.CONFIRM and program is not None and program.is_stretchable
        return TrialPlan(
            trial_id=f"{self._setup.study_id}-{number:04d}",
            number=number,
            purpose=purpose,
            candidate=candidate,
            name=name,
            window=window,
            memory_limit=self._setup.memory_limit,
            deadline_s=deadline,
            protected_before=self._setup.opened_at,
            longest_sequence=program.longest_sequence if program is not None and warms_up_longest else None,
            flops_per_sample=None if model is None else model.flops_per_sample,
            formats=formats_known(profiled, candidate),
            arrival=Arrival() if known.found is None else known.found.arrival,
            device=self._setup.device,
            weighs=purpose is Purpose.CONFIRM,
            replicas=_replicas_meant(purpose, candidate, known.base_config),
            ends_at_arrival=bool(begins),
            varied_options=varied_options(self._setup.experiment) if profiled is None else {},
            **self._run_with(
                candidate.complete(known.base_config),
                paths,
                known,
                as_typed,
                candidate.switches,
                known.own_config(self._setup.experiment),
                may_be_refused=profiled is not None or known.found is not None,
            ),
        )

    def _offloaded(self, candidate: Candidate, known: KnownProgram, profile: TrialResult) -> float:
        # The bytes that each rank of a candidate moves to its host. On a CPU they stay where they are.
        if profile.profile is None or kind_of(self._setup.device).computes_on_the_processor:
            return 0.0
        accumulates = candidate.gradient_accumulation_steps > 1
        config = candidate.complete(known.base_config)
        return host_bytes(config, profile.profile, candidate.slots, accumulates, Layout.of(known.base_config)).moved

    def typed(self, profile: TrialPlan, base_config: Mapping[str, Any]) -> TrialPlan:
        """The profile trial's first run, in which the program runs as it was typed."""
        return replace(
            profile, **self._run_with(dict(base_config), profile.paths.as_typed, KnownProgram(), as_typed=True)
        )

    def _run_with(
        self,
        settings: dict[str, Any],
        paths: TrialPaths,
        known: KnownProgram,
        as_typed: bool,
        switches: Mapping[str, SwitchValue] | None = None,
        own: Mapping[str, Any] | None = None,
        may_be_refused: bool = False,
    ) -> dict[str, Any]:
        experiment, config = self._setup.experiment, deepspeed_part(settings)
        environment, beside = self._setup.environment, beside_kind(switches or {})
        if beside:
            on_processor = kind_of(self._setup.device).computes_on_the_processor
            environment = without_deepspeed(environment, beside, config, on_processor)
        program_with = partial(
            program_of,
            experiment,
            environment,
            paths.ds_config,
            known.in_words(config),
            paths.training_spec,
        )
        refused = None
        try:
            program = program_with(known.arg_mappings, as_typed, switches, self.check)
        except (InputError, TimeoutError) as error:
            if not may_be_refused:
                raise
            is_late = isinstance(error, TimeoutError)
            refused = (Outcome.TIMED_OUT if is_late else Outcome.INVALID, f"Not tried: {error}", is_late)
            # For the trial's records alone.
            program = program_with({}, as_typed=True)
        return {
            "ds_config": with_open_batch(config, own or {}),
            "config_hash": config_hash(settings),
            "program": program,
            "refused": refused,
            "paths": paths,
            "training_spec": trial_spec(experiment, config, paths),
            "as_typed": as_typed,
            "turned": {**experiment.config.turned, **turned_among(switches or {})},
        }


def on_same_devices(plan: TrialPlan, results: Iterable[TrialResult]) -> TrialPlan:
    """Returns a plan that prefers the devices of the last trial of its purpose, because the two are compared."""
    before = [result for result in results if result.purpose is plan.purpose and result.devices]
    return replace(plan, preferred=tuple(device.device for device in before[-1].devices)) if before else plan


def submitted_candidate(base_config: Mapping[str, Any], slots: int, profile: ModelProfile | None) -> Candidate:
    """The user's configuration as a candidate. Raises InputError if the user's code decides on the batch."""
    replicas = profile.data_parallel_size if profile else 1
    batch = resolve_batch(base_config, replicas)
    return Candidate(
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        slots=slots,
        data_parallel_size=replicas,
    )


def _replicas_meant(purpose: Purpose, candidate: Candidate, base_config: Mapping[str, Any]) -> int | None:
    # The replicas that a candidate's layout makes; None if it has the layout of the user's configuration.
    is_own = purpose in (Purpose.PROFILE, Purpose.SUBMITTED) or Layout.of(candidate.complete(base_config)) == Layout.of(
        base_config
    )
    return None if is_own else candidate.data_parallel_size


def formats_known(profiled: tuple[TrialResult, Candidate] | None, candidate: Candidate) -> tuple[str, ...] | None:
    """The number formats that the program computes in; None if its FLOPs cannot be compared with a peak.

    They cannot if the candidate may change the formats, or if a part of the program's FLOPs was not counted.
    """
    profile = None if profiled is None else profiled[0].profile
    if profiled is None or profile is None or profile.uncounted or _PRECISION & candidate.knobs.keys():
        return None
    return profiled[0].formats


def throughput_to_beat(method: MethodName, metric: str, best: TrialResult | None) -> float | None:
    """The throughput (samples/s) that a trial of the search has to come near; None if it may be anything.

    A trial below it is stopped early. dsat's methods take a stopped trial for a failed one, so their trials run to the
    end.
    """
    may_end = METHODS[method].ends_hopeless_trials and SEARCH_METRICS[metric].is_throughput
    if best is None or not may_end:
        return None
    return best.metrics.get("throughput")


# The training spec of an experiment, which its ranks read: in a trial, and in a full experiment.

# The hyperparameters in the form that training code reads, with the DeepSpeed configuration in its place.


def merged_hparams(
    hyperparameters: Hyperparameters, ds_config: Mapping[str, Any], ds_config_path: Path
) -> dict[str, Any]:
    """The hyperparameters with another complete DeepSpeed configuration, in the form of the user's.

    If the file has the key of the overwrites, it stays with an empty value, for code that reads it.
    """
    hparams = hyperparameters.as_dict()
    if OVERWRITES in hparams:
        hparams[OVERWRITES] = {}
    if inline_ds_config(hparams) is not None:
        rest = {key: value for key, value in hparams.items() if key not in DEEPSPEED_KEYS}
        return {**rest, **ds_config}
    if isinstance(hyperparameters.deepspeed_config, Mapping):
        return {**hparams, CONFIG: dict(ds_config)}
    return {**hparams, CONFIG: str(ds_config_path)}


def with_derived_batch(ds_config: Mapping[str, Any], own: Mapping[str, Any], slots: int) -> dict[str, Any]:
    """A trial's configuration for code to read, with a `train_batch_size` if the user's has one.

    ZeroTune removes it from the configuration that the code hands to DeepSpeed, because a pipeline has fewer replicas
    than slots. Here the slots are taken as the number of replicas.
    """
    micro, accumulation = ds_config.get(MICRO_BATCH), ds_config.get(ACCUMULATION, 1)
    if TRAIN_BATCH not in own or TRAIN_BATCH in ds_config or not (type(micro) is type(accumulation) is int):
        return dict(ds_config)
    return {**ds_config, TRAIN_BATCH: micro * accumulation * slots}


def trial_spec(experiment: Experiment, ds_config: Mapping[str, Any], paths: TrialPaths) -> TrainingSpec:
    """The spec of a trial's ranks. They train until the driver ends them."""
    readable = with_derived_batch(ds_config, experiment.ds_config, experiment.config.resources.slots_per_trial)
    hparams = _hparams(experiment, readable, paths.ds_config)
    return _spec(experiment, hparams, paths.tensorboard, paths.scratch)


def full_length_spec(experiment: Experiment, ds_config: Mapping[str, Any], paths: FullExperimentPaths) -> TrainingSpec:
    """The spec of a full experiment's ranks. `ds_config` is empty for code that has its own."""
    config = experiment.config
    hparams = _hparams(experiment, ds_config, paths.ds_config) if ds_config else config.hyperparameters.as_dict()
    return dataclasses.replace(
        _spec(experiment, hparams, paths.tensorboard, paths.scratch),
        length=_length(config.searcher.max_length),
        validation_period=_length(config.min_validation_period),
        checkpoint_period=_length(config.min_checkpoint_period),
        checkpoints=str(paths.checkpoints),
        metrics=str(paths.metrics),
        finished=str(paths.finished),
        stop=str(paths.stop),
    )


def _spec(experiment: Experiment, hparams: dict[str, Any], tensorboard: Path, scratch: Path) -> TrainingSpec:
    config = experiment.config
    return TrainingSpec(
        trial=experiment.entrypoint.trial_class,
        hparams=hparams,
        experiment_config=_shown_config(config),
        seed=config.reproducibility.experiment_seed,
        report_period=config.scheduling_unit,
        records_per_epoch=config.records_per_epoch,
        metric=config.searcher.metric,
        smaller_is_better=config.searcher.smaller_is_better,
        tensorboard=str(tensorboard),
        scratch=str(scratch),
    )


def _hparams(experiment: Experiment, ds_config: Mapping[str, Any], ds_config_path: Path) -> dict[str, Any]:
    hparams = merged_hparams(experiment.config.hyperparameters, ds_config, ds_config_path)
    if experiment.entrypoint.trial_class is None:
        # A script may read its own file by a fixed name, and merge these into it.
        hparams[OVERWRITES] = dict(ds_config)
    return hparams


def _length(length: Length | None) -> dict[str, int] | None:
    # A length for the ranks; None if there is none, and for a period of 0, which never comes.
    units: dict[str, int] = {} if length is None else length.model_dump(exclude_none=True)
    return units if any(units.values()) else None


def _shown_config(config: ExperimentConfig) -> dict[str, Any]:
    # As the code may log it, without secrets. The code gets the hyperparameters separately and whole. It gets `data`
    # only here, so `data` stays as written.
    whole = config.model_dump(mode="json", exclude_unset=True)
    shown = redact(whole)
    if "data" in whole:
        shown["data"] = whole["data"]
    return shown
