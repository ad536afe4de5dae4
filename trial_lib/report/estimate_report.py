"""The memory of each ZeRO stage on a device, with and without offload: predicted with intervals, and measured."""

from collections.abc import Iterable
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, resolve_batch
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, FrozenRecord
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.records.units import bytes_shown
from zerotune.trial_lib.search.budgets import HostMemory, MemoryBasis
from zerotune.trial_lib.search.knobs import ZERO_STAGES
from zerotune.trial_lib.search.memory_model import MemoryModel, measured_above_initialize
from zerotune.trial_lib.search.zero_settings import arm_key, arm_label
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.known_trials import KnownTrials
from zerotune.trial_lib.study.limits import size_limit
from zerotune.trial_lib.study.setup import StudySetup

CONFIDENCE = 0.9
# Larger sizes are of no interest, however small the model.
_LARGEST = 2**16
_TO_CPU = {"device": "cpu"}
_PIPELINES_STAGES = (0, 1)


class MeasuredArm(FrozenRecord):
    """The trials of a row's configurations, with any bucket sizes."""

    completed: int  # the number of trials that completed
    largest_micro_batch: int | None = None  # the largest completed size, in samples; None if no trial completed
    smallest_out_of_memory: int | None = None  # the smallest size that ran out of memory; None if none did
    out_of_host_memory: int = 0  # the number of trials that the host had no room for
    # Bytes of the largest completed one: its measured peak above initialisation, plus initialisation
    total: int | None = None


class ArmEstimate(FrozenRecord):
    """The memory of one stage with one kind of offload, in bytes on one device."""

    label: str  # such as `z2` or `z3-offload-optimizer`
    stage: int  # the ZeRO stage
    states: int  # parameters, gradients and optimizer states
    on_host: int  # bytes that each rank keeps in the host's memory instead
    activations: int  # at the micro-batch of the report
    total: int  # everything, at that micro-batch
    total_low: int  # the lower end of its 90 % interval
    total_high: int  # the upper end
    # Samples that have run, or fit with 90 % confidence. 0 if not even one sample does, or if the host has no room for
    # the offloaded states.
    largest_micro_batch: int
    perhaps_micro_batch: int  # samples that fit with 10 % confidence
    measured: MeasuredArm | None = None  # the trials; None if there are none


class EstimateReport(FrozenRecord):
    profile: ModelProfile  # the model, as the profile trial found it
    device: str  # `cuda` or `cpu`
    host_memory: int | None  # bytes that each rank may keep in the host's memory. None on a CPU, or if it is not known.
    slots: int  # devices of a trial
    micro_batch_size: int  # the samples that activations and total are for
    at_most: int  # the largest micro-batch size that was considered
    bounded_by: str = ""  # what sets it. Empty if no program has so large a batch.
    headroom: float  # the share of the memory that stays free
    studies: list[str]  # ids of the studies whose trials were used. Empty if only a profile trial was run.
    rows: list[ArmEstimate]  # one for each stage and kind of offload
    notes: list[str]  # further notes for the reader, a sentence each

    @property
    def bound(self) -> str:
        """Which sizes are not considered, in a sentence; empty if all are."""
        if not self.bounded_by:
            return ""
        return f"Micro-batches above {self.at_most} are not considered, because of {self.bounded_by}."

    def largest(self, row: ArmEstimate) -> str:
        """The largest micro-batch of a row. The one in parentheses fits with 10 % confidence."""
        if row.largest_micro_batch == self.at_most:
            return f"{self.at_most} {'(all)' if self.bounded_by else 'and more, as far as memory goes'}"
        perhaps = "" if row.perhaps_micro_batch == row.largest_micro_batch else f" ({row.perhaps_micro_batch})"
        return f"{row.largest_micro_batch or 'none'}{perhaps}"

    def lines(self) -> list[str]:
        """The report for a log."""
        profile = self.profile
        return [
            f"parameters: {profile.num_params:,}, trainable: {profile.trainable_num_params:,}",
            f"device memory for the model: {bytes_shown(profile.gpu_mem)}; "
            f"activations of one sample: {bytes_shown(profile.activation_mem_per_gpu)}",
            *(f"{row.label}: states {bytes_shown(row.states)}, micro-batch {self.largest(row)}" for row in self.rows),
            *filter(None, [self.bound]),
        ]


def estimate_report(known: KnownTrials, slots: int, device: str, arguments: StudyArguments) -> EstimateReport:
    """`arguments` bound the micro-batch sizes, as those of a study do."""
    profile, base, headroom = known.model_profile, known.base_config, arguments.memory_headroom
    limit = size_limit(arguments, base, profile, known.profile[1].program)
    basis = MemoryBasis(profile, base, slots, device)
    model = MemoryModel(basis)
    model.observe_profile(*known.profile)
    host = HostMemory(basis)
    for trial in known.trials:
        model.observe(*trial)
        host.observe(*trial)
    stages = _PIPELINES_STAGES if profile.pipeline_parallel else ZERO_STAGES
    size = _own_size(base, profile.data_parallel_size)
    at_most = _LARGEST if limit is None else min(_LARGEST, limit.size)
    return EstimateReport(
        profile=profile,
        device=device,
        host_memory=None if host.limit is None else int(host.limit),
        slots=slots,
        micro_batch_size=size,
        at_most=at_most,
        bounded_by="" if limit is None else limit.by,
        headroom=headroom,
        studies=list(known.studies),
        rows=[_row(model, host, known, knobs, slots, size, at_most, headroom) for knobs in _arms(base, device, stages)],
        notes=_notes(known, device),
    )


def estimate_of_profile(
    setup: StudySetup, profiled: tuple[TrialResult, Candidate], base_config: dict[str, Any]
) -> EstimateReport:
    """The estimate of a study, of which only the profile trial has ended."""
    result, candidate = profiled
    assert result.profile is not None
    known = KnownTrials(result.profile, (candidate, result), base_config)
    return estimate_report(known, setup.slots, setup.device, setup.arguments)


def _arms(base: dict[str, Any], device: str, stages: Iterable[int]) -> list[dict[str, Any]]:
    # The knobs of each row. They withdraw the user's own offload, or set one.
    own = base.get("zero_optimization") or {}
    neutral = {key: None for key in ("offload_optimizer", "offload_param") if key in own}
    arms: list[dict[str, Any]] = []
    may_offload = not kind_of(device).computes_on_the_processor
    for stage in stages:
        plain: dict[str, Any] = {"stage": stage, **neutral}
        arms.append(plain)
        if may_offload and stage >= 1:
            arms.append({**plain, "offload_optimizer": _TO_CPU})
        if may_offload and stage == 3:
            arms.append({**plain, "offload_optimizer": _TO_CPU, "offload_param": _TO_CPU})
    return [{"zero_optimization": arm} for arm in arms]


def _row(
    model: MemoryModel,
    host: HostMemory,
    known: KnownTrials,
    knobs: dict[str, Any],
    slots: int,
    size: int,
    at_most: int,
    headroom: float,
) -> ArmEstimate:
    accumulation = known.base_config.get(ACCUMULATION, "auto")

    def batch(micro_batch_size: int) -> Candidate:
        return Candidate(
            knobs=knobs,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=1 if accumulation == "auto" else accumulation,
            slots=slots,
            data_parallel_size=known.model_profile.data_parallel_size,
        )

    candidate = batch(size)

    def largest(confidence: float) -> int:
        if not host.fits(candidate):
            return 0
        return model.largest_micro_batch(knobs, batch, at_most, headroom, confidence)

    needed, steps = model.allocations(candidate), model.above_initialize(candidate)
    config = candidate.complete(known.base_config)
    return ArmEstimate(
        label=arm_label(config),
        stage=config["zero_optimization"]["stage"],
        states=int(needed.all_states),
        on_host=int(host.needed(candidate)),
        activations=int(needed.activations),
        total=int(needed.initialize + steps.value),
        total_low=int(needed.initialize + steps.low),
        total_high=int(needed.initialize + steps.high),
        largest_micro_batch=largest(CONFIDENCE),
        perhaps_micro_batch=largest(1 - CONFIDENCE),
        measured=_measured(model, known, config),
    )


def _measured(model: MemoryModel, known: KnownTrials, config: dict[str, Any]) -> MeasuredArm | None:
    arm = arm_key(config)
    trials = [trial for trial in known.trials if arm_key(trial[0].complete(known.base_config)) == arm]
    completed = [trial for trial in trials if trial[1].outcome is Outcome.COMPLETED]
    failed = [trial[0].micro_batch_size for trial in trials if trial[1].outcome is Outcome.OUT_OF_MEMORY]
    of_host = sum(trial[1].outcome is Outcome.OUT_OF_HOST_MEMORY for trial in trials)
    if not completed and not failed and not of_host:
        return None
    largest = max(completed, key=lambda trial: trial[0].micro_batch_size, default=None)
    steps = None if largest is None else measured_above_initialize(largest[1].memory)
    return MeasuredArm(
        completed=len(completed),
        largest_micro_batch=None if largest is None else largest[0].micro_batch_size,
        smallest_out_of_memory=min(failed, default=None),
        out_of_host_memory=of_host,
        total=None if largest is None or steps is None else int(model.allocations(largest[0]).initialize + steps),
    )


def _own_size(base: dict[str, Any], replicas: int) -> int:
    # The user's micro-batch size; 1 if the user's code decides on it.
    try:
        return resolve_batch(base, replicas).micro_batch_size
    except InputError:
        return 1


def _notes(known: KnownTrials, device: str) -> list[str]:
    notes = []
    if kind_of(device).computes_on_the_processor:
        notes.append(
            "Offloading to the CPU is left out: on a CPU slot the states stay in the same memory, so it saves nothing."
        )
    if not known.trials:
        notes.append("Only the profile trial was measured. A study of this experiment narrows the intervals.")
    if known.model_profile.pipeline_parallel:
        notes.append(
            "DeepSpeed runs a pipeline with ZeRO stages 0 and 1 only. The table assumes that the devices share the "
            "parameters equally."
        )
    return notes
