"""How long a trial may take before something must be wrong. Pure."""

from trial_lib.experiment.candidate import Candidate
from trial_lib.experiment.result import TrialResult
from trial_lib.experiment.window import StepWindow

# Nothing is known yet; a large model may be read from a slow disk.
PROFILE_DEADLINE_S = 1800.0

_FLOOR_S = 120.0
_PATIENCE = 5.0


def deadline_s(profile: TrialResult, profiled: Candidate, candidate: Candidate, window: StepWindow) -> float:
    """Returns the deadline of a trial in seconds, from what the profile trial took.

    Five times what the start took with the first step, and five times the window's first steps at the profile's time
    per sample, over a floor of two minutes: a trial within it can be slow, one beyond it hangs.
    """
    # The profile's own start holds the priming and the builds, which no later trial pays. What a program compiles it
    # compiles in its first step, in each trial anew.
    setup = sum(profile.phases.get(phase, 0.0) for phase in ("import", "initialize", "first_step"))
    samples = candidate.micro_batch_size * candidate.gradient_accumulation_steps
    profiled_samples = profiled.micro_batch_size * profiled.gradient_accumulation_steps
    step = profile.metrics["latency"] * samples / profiled_samples
    return _FLOOR_S + _PATIENCE * (setup + step * window.end_step + window.max_seconds)
