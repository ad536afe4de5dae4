"""What the profile trial shows of the program, in sentences, and why it has failed."""

from collections.abc import Mapping
from typing import Any

from zerotune.trial_lib.inputs.places import spelling
from zerotune.trial_lib.messages.measurement import ModelProfile, ProgramProfile
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.setup import StudySetup

_MOST_NAMED = 4


def program_notes(program: ProgramProfile | None, arg_mappings: Mapping[Any, str] | None = None) -> list[str]:
    """Notes on the program that the user may want to act on, a sentence each."""
    if program is None:
        return []
    notes = [_TWO_CONFIGS] if program.hands_over_two_configs else []
    seen = {spelling(target): key for key, target in program.arg_mappings.items()}
    notes += [
        f"{target} sets {seen[spelling(target)]}. The mapping that says {key} is left out."
        for key, target in (arg_mappings or {}).items()
        if seen.get(spelling(target), key) != key
    ]
    if program.divided_among > 1:
        notes.append(_DIVIDED.format(program.divided_among))
    if program.devices_in_code:
        notes.append(_DEVICES.format(program.devices_in_code))
    if program.resumed_stage is not None:
        # Stages 1 and 2 have one form (deepspeed/runtime/zero/stage_1_and_2.py).
        can = "ZeRO 1 or 2" if program.resumed_stage in (1, 2) else f"ZeRO {program.resumed_stage}"
        ranks = " on as many ranks as before" if program.resumed_stage else ""
        notes.append(_RESUMES.format(program.resumed_stage, can, ranks))
    return notes


_TWO_CONFIGS = (
    "The code hands deepspeed.initialize two configurations, one in `args` and one as `config`. Trials use `config`. "
    "Present versions of DeepSpeed refuse two, so remove one of them to train without ZeroTune."
)
_DIVIDED = (
    "The {0} ranks divide a batch of the typed size among them (split_batches). Here a micro-batch is what arrives at "
    "one rank, so the typed size is {0} times as large."
)
_DEVICES = (
    "The code sets {}. In a trial these numbers count the trial's own devices, and one that it has not means all of "
    "them. To keep trials off a device, set the variable before the command."
)
_RESUMES = (
    "The code resumes from a checkpoint of ZeRO {}. Trials load no weights and no states from it. DeepSpeed resumes it "
    "with {} alone{}. Another answer needs it as a universal checkpoint (deepspeed/checkpoint/ds_to_universal.py), "
    "or a new start."
)


def model_notes(profile: ModelProfile) -> list[str]:
    """Notes on the model's figures, a sentence each."""
    if not profile.uncounted:
        return []
    more = len(profile.uncounted) - _MOST_NAMED
    named = ", ".join(profile.uncounted[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return [
        f"The FLOPs of {named} are not counted, because they are not known. "
        "So there is no model FLOPs utilisation (mfu)."
    ]


def had_engine(setup: StudySetup, profile: TrialResult) -> bool:
    """Whether every rank of the profile trial reached a DeepSpeed engine, in either of its runs."""
    paths = setup.paths.trial(profile.number)
    return any(all(run.engine_built(rank).exists() for rank in range(setup.slots)) for run in (paths, paths.as_typed))


def profile_failure(result: TrialResult, had_engine: bool) -> str:
    """Why the profile trial failed, as a message that the user can act on."""
    if result.elsewhere:
        return result.reason
    if result.from_outside:
        return f"The profile trial was killed twice: {result.reason} `zerotune resume` runs it again."
    ended_by_itself = result.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.OUT_OF_DATA)
    if not had_engine and (ended_by_itself or "import" not in result.phases):
        what = "The program does not run as it was typed: it never had a DeepSpeed engine."
    elif ended_by_itself:
        what = "The program fails as it was typed."
    elif result.outcome is Outcome.OUT_OF_MEMORY:
        what = "Not even a micro-batch of 1 fits into memory."
    elif result.outcome is Outcome.OUT_OF_HOST_MEMORY:
        what = "The host's memory, not the device's, is not enough for the program."
    elif result.micro_batch_arrived is not None:
        what = "The program's batches do not have the requested size."
    else:
        what = f"The program cannot be tuned as it was typed: {result.outcome.value}."
    return f"{what} {result.reason}"
