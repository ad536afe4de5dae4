"""How long a trial may take before something must be wrong. Pure."""

from trial_lib.records.candidate import Candidate
from trial_lib.records.result import TrialResult
from trial_lib.wire.step_window import StepWindow

# Nothing is known yet; a large model may be read from a slow disk.
PROFILE_DEADLINE_S = 1800.0

_FLOOR_S = 120.0
_PATIENCE = 5.0
# What a rank's host gets through at least: pages are made and locked at one to two gigabytes a second, a disk for all
# ranks is slower, and so is an update of offloaded states on few cores.
_HOST_BYTES_PER_S = 1e9


def deadline_s(
    profile: TrialResult, profiled: Candidate, candidate: Candidate, window: StepWindow, offloaded: float = 0.0
) -> float:
    """Returns the deadline of a trial in seconds, from what the profile trial took.

    Five times what the start took with the first step, and five times the window's first steps at the profile's time
    per sample, over a floor of two minutes: a trial within it can be slow, one beyond it hangs. States that are
    offloaded have to be filled, and a step goes through all of them, of which the profile trial has shown nothing.

    Args:
        profile: how the profile trial ended.
        profiled: its candidate.
        candidate: the trial's.
        window: the steps that it measures.
        offloaded: bytes that each of its ranks moves to its host, or on to a disk.
    """
    # The profile's own start holds the priming and the builds, which no later trial pays. What a program compiles it
    # compiles in its first step, in each trial anew.
    setup = sum(profile.phases.get(phase, 0.0) for phase in ("import", "initialize", "first_step"))
    samples = candidate.micro_batch_size * candidate.gradient_accumulation_steps
    profiled_samples = profiled.micro_batch_size * profiled.gradient_accumulation_steps
    step = profile.metrics["latency"] * samples / profiled_samples
    moving = offloaded / _HOST_BYTES_PER_S * (1 + window.end_step)
    return _FLOOR_S + _PATIENCE * (setup + step * window.end_step + window.max_seconds + moving)
