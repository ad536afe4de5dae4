"""The profile trial of a study: its two runs, the check of the mapped batch, and the build of the operators."""

import contextlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from zerotune.trial_lib.deepspeed_config.rules import Setting
from zerotune.trial_lib.inputs.places import BatchPlace, batch_places, same_place
from zerotune.trial_lib.launch.outcome import FAILURE, read_record
from zerotune.trial_lib.launch.processes.watchdog import bound_logs
from zerotune.trial_lib.launch.trial import Place, TrialPlan, unstarted, write_unstarted
from zerotune.trial_lib.messages.files import make_own_folder, write_whole
from zerotune.trial_lib.messages.measurement import BatchSizes, Import, ProgramProfile
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult, as_sentence, without_log
from zerotune.trial_lib.search.knobs import STAGE, get_knob
from zerotune.trial_lib.study.history import SUBMITTED_NUMBER
from zerotune.trial_lib.study.limits import with_ops_built, with_swap_disks
from zerotune.trial_lib.study.own_command import suspected_places
from zerotune.trial_lib.study.plans import TrialPlans
from zerotune.trial_lib.study.program import KnownProgram
from zerotune.trial_lib.study.setup import StudySetup

# Facts that only the run at a small size looks for, or that two sizes show better than one.
_OF_THE_DATA = (
    "longest_sequence",
    "shortest_sequence",
    "is_stretchable",
    "rows_per_sample",
    "batch_dimension",
    "other_rows_per_sample",
)
# Outcomes that another small size would not change.
_AT_EVERY_SIZE = (Outcome.OUT_OF_MEMORY, Outcome.OUT_OF_HOST_MEMORY, Outcome.TIMED_OUT)


def run_profile(
    profile: TrialPlan,
    typed: TrialPlan,
    plans_for: Callable[[ProgramProfile, int], Sequence[TrialPlan]],
    run: Callable[[TrialPlan], TrialResult],
    prime: Callable[[Sequence[Import]], None],
    places_of: Callable[[TrialResult, int], Sequence[tuple[str, str]]] = lambda result, size: (),
    is_placed: bool = False,
) -> TrialResult:
    """Runs the profile trial to its end. Its result is also in its folder, unless it was cut short.

    `typed` is its first run, of the program as it was typed. `plans_for` gives the runs at a micro-batch size
    (samples), from what the first run has found. Each one is for a program that the one before has failed. `prime` gets
    what the first run has imported. `places_of` gives the keys and places from which a program may have the typed
    batch size, if it has not followed another. A run shows for each whether it does. A program that was typed at 1 is
    the profile. It begins once more at 2 for its place alone, unless that is known (`is_placed`).
    """
    seen = run(typed)
    program = seen.program
    if _is_cut_short(seen):
        return seen
    if program is None or program.typed_batch is None:
        write_unstarted(profile, seen)
        return seen
    prime(seen.imported)
    own = program.typed_batch.micro_batch_size
    is_seen, is_least = seen.outcome is Outcome.COMPLETED, own == 1
    failed: TrialResult | None = None
    is_known = is_placed or MICRO_BATCH in {**program.arg_mappings, **program.batch}
    # Those below its own, or one above.
    sizes = [2] if is_least and is_seen and not is_known else [2**each for each in range((own - 1).bit_length())]
    if is_seen and program.batch_varies:
        sizes = []
    for plan in (plan for size in sizes for plan in plans_for(program, size)):
        result = run(plan)
        has_stayed = _is_ignored(result) and result.micro_batch_arrived == own
        # The code may compare the size with an option of its own.
        if is_seen and program.rows_per_sample == 1 and (has_stayed or result.outcome is Outcome.CRASHED):
            size, maps = plan.candidate.micro_batch_size, program.arg_mappings
            places = [(key, place) for key, place in places_of(result, own) if key not in maps]
            placed = {place: replace(program, arg_mappings={**maps, key: place}) for key, place in places}
            runs = ((run(each), each, place) for place in placed for each in plans_for(placed[place], size))
            ends = (each for each in runs if each[0].outcome is Outcome.COMPLETED or _is_cut_short(each[0]))
            if (followed := next(ends, None)) is not None:
                result, plan, place = followed
                program = placed[place]
                result = _with_note(result, f"The program has its batch from {place}, so trials set it there.")
            elif has_stayed:
                # What was typed agrees with what arrives, so everything but the size can be tuned.
                fed = result.reason.partition(". ")[0].rstrip(".")
                tried = f"{fed}. It did not follow {' or '.join(placed)} either." if placed else result.reason
                program = replace(program, fixed_batch=tried)
                break
        if is_least and result.outcome is Outcome.COMPLETED:
            seen, failed = _with_note(seen, result.note), None
            break
        if result.outcome is Outcome.COMPLETED or _is_cut_short(result) or (_is_ignored(result) and not is_least):
            return _kept(plan, _noted(result, plan, failed), seen, program)
        failed = failed or result
        if result.outcome in _AT_EVERY_SIZE:
            break
    if failed is not None and failed.outcome is Outcome.OUT_OF_MEMORY and not is_least:
        return failed
    plan = plans_for(program, own)[0]
    return _kept(plan, _noted(seen, plan, failed, is_least), seen, program)


def _noted(result: TrialResult, plan: TrialPlan, failed: TrialResult | None, is_least: bool = False) -> TrialResult:
    # The result of a profile trial with a note on a run before it that failed, if one did.
    if failed is None or result.outcome is not Outcome.COMPLETED:
        return result
    size, accumulation = plan.candidate.micro_batch_size, plan.candidate.gradient_accumulation_steps
    what = f"The profile is of a micro-batch of {size} x {accumulation}, because a run of a smaller batch failed."
    if is_least:
        what = "Whether the program follows a micro-batch of more than 1 is not known, because a run of 2 failed."
    return _with_note(result, f"{what} {as_sentence(without_log(failed.reason))}".rstrip())


def _with_note(result: TrialResult, note: str) -> TrialResult:
    return replace(result, note=" ".join(filter(None, (result.note, note))))


def profile_candidates(program: ProgramProfile, size: int, slots: int, types_batch: bool) -> list[Candidate]:
    """The candidates of the profile trial: a micro-batch size, and everything else as typed.

    The first one has the accumulation of the program. A program may compare the global batch in the configuration with
    an option of its own. So the second one has the typed global batch, at another accumulation, if the configuration
    has it as a number (`types_batch`).
    """
    typed = program.typed_batch
    assert typed is not None
    replicas = typed.train_batch_size // (typed.micro_batch_size * typed.gradient_accumulation_steps)
    accumulations = [typed.gradient_accumulation_steps]
    if types_batch and size != typed.micro_batch_size and typed.train_batch_size % (size * replicas) == 0:
        accumulations.append(typed.train_batch_size // (size * replicas))
    return [
        Candidate(
            micro_batch_size=size, gradient_accumulation_steps=accumulation, slots=slots, data_parallel_size=replicas
        )
        for accumulation in accumulations
    ]


def _is_cut_short(result: TrialResult) -> bool:
    return result.from_outside or result.outcome is Outcome.CANCELLED


def _is_ignored(result: TrialResult) -> bool:
    return result.outcome is Outcome.INVALID and result.micro_batch_arrived is not None


def _kept(plan: TrialPlan, result: TrialResult, seen: TrialResult, typed: ProgramProfile) -> TrialResult:
    # Writes a result as the trial's own, with what the run of the program as typed has found. Returns it.
    of_the_data: dict[str, Any] = {}
    if result.program is not None:
        of_the_data = {name: getattr(result.program, name) for name in _OF_THE_DATA}
        if result.program.samples_per_epoch != typed.samples_per_epoch:
            of_the_data["samples_per_epoch"] = None
        # The run of the program as typed may have ended before its backward pass.
        of_the_data["formats"] = sorted({*typed.formats, *result.program.formats})
    program = replace(typed, **of_the_data)
    # A later run has found the modules of the first one imported, and not what the program had set before.
    imported = [*seen.imported, *(each for each in result.imported if each not in seen.imported)]
    kept = replace(result, program=program, config_hash=plan.config_hash, trial_id=plan.trial_id, imported=imported)
    write_unstarted(plan, kept)
    return kept


# Compares the mapped places of a command with the batch that the program's engine had when it ran as typed.


def held_against(
    result: TrialResult,
    places: Sequence[BatchPlace],
    arg_mappings: Mapping[Any, str],
    typed_config: Mapping[str, Any] | None = None,
) -> TrialResult:
    """Returns the result of the run as typed, compared with the batch in its command.

    An option among `arg_mappings` that was not typed has its default. `typed_config` is the configuration in a file;
    None or empty if it is in the code.
    """
    if result.program is None:
        return result
    options = result.program.options
    # A default may not be meant, so it contradicts nothing. But it may be the size that the program feeds.
    defaults = [
        BatchPlace(str(key), options[target], f"{target} {options[target]}")
        for key, target in arg_mappings.items()
        if target in options and all(place.key != key for place in places)
    ]
    program = as_mapped(result.program, [*places, *defaults])
    # The code may have changed what it read from the file.
    wrong = wrong_mapping(program, places, program.ds_config or typed_config or {})
    if wrong is not None:
        return replace(result, outcome=Outcome.INVALID, reason=wrong, program=None, micro_batch_arrived=None)
    return replace(result, program=program)


def as_mapped(program: ProgramProfile, places: Sequence[BatchPlace]) -> ProgramProfile:
    """Returns the findings of a run as typed, with the micro-batch that the program really feeds.

    A program may leave its engine at a size that it does not feed, because DeepSpeed does not compare them. If as many
    rows arrive as the mapped micro-batch has, that is the user's micro-batch.
    """
    typed = program.typed_batch
    fed = next((place.value for place in places if place.key == MICRO_BATCH), None)
    if typed is None or fed is None or fed == typed.micro_batch_size or program.batch_varies:
        return program
    if program.rows_per_sample * typed.micro_batch_size == fed:
        dimension = program.batch_dimension
    elif program.other_rows_per_sample * typed.micro_batch_size == fed:
        dimension = 1 - program.batch_dimension
    else:
        return program
    replicas = typed.train_batch_size // (typed.micro_batch_size * typed.gradient_accumulation_steps)
    batch = BatchSizes(fed * typed.gradient_accumulation_steps * replicas, fed, typed.gradient_accumulation_steps)
    rows = replace(program, rows_per_sample=1, batch_dimension=dimension, other_rows_per_sample=0)
    return replace(rows, typed_batch=batch)


def wrong_mapping(program: ProgramProfile, places: Sequence[BatchPlace], typed_config: Mapping[str, Any]) -> str | None:
    """How a mapped value differs from that of the program's engine, by `as_mapped`; None if all agree."""
    typed = program.typed_batch
    if typed is None:
        return None
    had = {
        MICRO_BATCH: typed.micro_batch_size * program.divided_among,
        ACCUMULATION: typed.gradient_accumulation_steps,
        TRAIN_BATCH: typed.train_batch_size,
    }
    # A library decides on "auto", and may well read the place.
    if get_knob(typed_config, STAGE) != "auto":
        had[STAGE] = Setting(typed_config, "cpu", None, None).stage
    for place in places:
        if place.value != had.get(place.key, place.value):
            others = [key for key, value in had.items() if value == place.value]
            name = re.split("[ =]", place.shown)[0]
            if any(same_place(name, program.arg_mappings.get(key, "")) for key in others):
                continue  # `KnownProgram.learned` leaves it out.
            remedy = (
                f"If it sets the {others[0]}, map that key to it."
                if others
                else "Map the place that sets it, or nothing."
            )
            return (
                f"{place.key} is mapped to {place.shown}, but as typed the program's engine has {had[place.key]}. "
                f"Trials would differ from your training. {remedy}"
            )
    return None


def run_profile_of_study(
    setup: StudySetup, place: Place, plan: TrialPlan, run: Callable[..., TrialResult]
) -> TrialResult:
    """Runs the profile trial of a study to its end. `run` runs one plan, and perhaps another after it in its ranks.

    The operators that the search needs are built meanwhile. The result names those that cannot be built, and the free
    room of the disks to which arms may swap. The first run may also measure the user's configuration (`own_reading`).
    """
    plans, experiment, typed = TrialPlans(setup), setup.experiment, KnownProgram.of(setup.experiment)
    entry, mappings = experiment.entrypoint, experiment.config.arg_mappings

    def plans_for(program: ProgramProfile, size: int) -> list[TrialPlan]:
        known = typed.learned(program)
        types_batch = type(experiment.ds_config.get(TRAIN_BATCH)) is int
        candidates = profile_candidates(program, size, plan.candidate.slots, types_batch)
        return [plans.plan(plan.number, plan.purpose, candidate, known, None) for candidate in candidates]

    def run_and_compare(plan: TrialPlan) -> TrialResult:
        if plan.refused is not None:
            return unstarted(plan, *plan.refused[:2])
        if not plan.as_typed:
            return run(plan)
        result = run_with_ops(
            plan, place, lambda plan: run(plan, own_plan(plan, setup)) if plan.with_own else run(plan)
        )
        places = batch_places(entry.arguments, setup.environment, mappings, experiment.model_dir, entry.wrapper)
        return held_against(result, places, mappings, experiment.ds_config)

    def places_of(result: TrialResult, size: int) -> list[tuple[str, str]]:
        found = suspected_places(result, size, entry, setup.environment, experiment.model_dir)
        # A place that the user has mapped is set already.
        return [each for each in found if each[1] not in mappings.values()]

    forget_own(plan)
    first = plans.typed(plan, typed.base_config)
    is_placed = MICRO_BATCH in typed.arg_mappings or entry.trial_class is not None
    profiled = run_profile(plan, first, plans_for, run_and_compare, place.prime, places_of, is_placed)
    complete = with_swap_disks(with_ops_built(profiled, setup, place.build), setup)
    if place.has_compiled:
        # The compilers have taken time from the ranks.
        forget_own(plan)
    return complete


def run_with_ops(plan: TrialPlan, place: Place, run: Callable[[TrialPlan], TrialResult]) -> TrialResult:
    """Runs the program as typed. Where it needs an op that is not built, has the op built, and runs it again.

    So no op is built for a program that never has an engine, and no slot waits for a compiler.
    """
    if place.starter_here is None:
        return run(plan)
    tried: set[str] = set()
    while True:
        result = run(replace(plan, ends_at_unbuilt_ops=True))
        missing = _unbuilt_ops(plan)
        if not missing or missing <= tried:
            break
        tried |= missing
        if missing & place.build(sorted(missing)).keys():
            break
    # A rank that cannot build it either says why.
    return run(plan) if missing else result


def _unbuilt_ops(plan: TrialPlan) -> set[str]:
    failures = (read_record(plan.paths.failure(rank), FAILURE) for rank in range(plan.candidate.slots))
    return {each.message for each in failures if each is not None and each.type == "OpNotBuiltError"}


def profiled_candidate(file: Path) -> Candidate | None:
    """The candidate that a profile trial measured in the end; None if its file is missing or damaged.

    A study asks for the smallest micro-batch. A program that cannot take it is profiled at a larger one.
    """
    try:
        return Candidate.model_validate_json(file.read_text())
    except (OSError, ValueError):
        return None


# The user's configuration, measured by the first run of the profile trial.

# The first run shows only what a step takes. A trial of its own has a deadline that follows from that.
_DEADLINE_S = 600.0
# The phases of a start, which the profile's second run pays as a trial of its own would: from a primed fork server.
_OF_A_START = ("start", "import", "initialize")
_LAST_PHASE = "end"


def own_plan(typed: TrialPlan, setup: StudySetup) -> TrialPlan:
    """The measurement of the user's configuration, for ranks that run the program as typed already."""
    arguments = setup.arguments
    return replace(
        typed,
        trial_id=f"{setup.study_id}-{SUBMITTED_NUMBER:04d}",
        number=SUBMITTED_NUMBER,
        purpose=Purpose.SUBMITTED,
        window=StepWindow(start_step=arguments.start_profile_step, end_step=arguments.end_profile_step),
        traces=True,
        deadline_s=_DEADLINE_S,
        varied_options={},
        paths=setup.paths.trial(typed.number).own,
    )


def forget_own(profile: TrialPlan) -> None:
    """Removes what the profile trial has measured of the user's configuration, now or in an earlier attempt."""
    shutil.rmtree(profile.paths.own.root, ignore_errors=True)


def own_reading(plan: TrialPlan, profile: TrialResult, paths: TrialPaths) -> TrialResult | None:
    """Returns that measurement as a trial of its own, and writes it to its folder; None if none counts."""
    first, measured = _result_in(paths.as_typed), _result_in(paths.own)
    if first is None or measured is None or not _counts(plan, profile, first, measured):
        return None
    ranks = range(plan.candidate.slots)
    started = {name: profile.phases[name] for name in _OF_A_START if name in profile.phases}
    phases = {name: seconds for name, seconds in measured.phases.items() if name not in _OF_A_START}
    result = replace(
        measured,
        name=plan.name,
        config_hash=plan.config_hash,
        metrics=_with_flops_of(profile, measured.metrics, plan.candidate.slots),
        phases={**started, **phases, _LAST_PHASE: phases.get(_LAST_PHASE, 0.0)},
        logs=[str(plan.paths.log(rank)) for rank in ranks],
        swept=False,
    )
    # The result comes last, because a resumed study takes a trial that has one as ended.
    make_own_folder(plan.paths.root)
    for rank in ranks:
        # The program has printed the beginning before.
        texts = [each.log(rank).read_text(errors="replace") for each in (paths.as_typed, paths.own)]
        write_whole(plan.paths.log(rank), "".join(texts))
        bound_logs([plan.paths.log(rank)])
        write_whole(plan.paths.measurement(rank), paths.own.measurement(rank).read_text())
    write_unstarted(plan, result)
    return result


def _counts(plan: TrialPlan, profile: TrialResult, first: TrialResult, measured: TrialResult) -> bool:
    if measured.trial_id != plan.trial_id or measured.outcome is not Outcome.COMPLETED or measured.note:
        return False
    if plan.longest_sequence is not None:
        # It would warm up on longer samples.
        return False
    if first.program is None or profile.program is None or first.program.arrival != profile.program.arrival:
        # It would count samples otherwise.
        return False
    # At a micro-batch of 1 the run has read ahead.
    return first.program.typed_batch is not None and first.program.typed_batch.micro_batch_size != 1


def _result_in(paths: TrialPaths) -> TrialResult | None:
    with contextlib.suppress(OSError, ValueError):
        return TrialResult.from_text(paths.result.read_text())
    return None


def _with_flops_of(profile: TrialResult, metrics: Mapping[str, float], ranks: int) -> dict[str, float]:
    # The metrics with the FLOPs of a sample that the profile has in the end, which all trials share.
    of_a_sample = 0.0 if profile.profile is None else profile.profile.flops_per_sample
    counted = metrics.get("FLOPS_per_gpu")
    if not of_a_sample or not counted:
        return dict(metrics)
    flops = of_a_sample * metrics["throughput"] / ranks
    utilisation = {"mfu": metrics["mfu"] * flops / counted} if "mfu" in metrics else {}
    return {**metrics, "FLOPS_per_gpu": flops, **utilisation}
