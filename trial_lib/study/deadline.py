"""The deadline of a trial. A trial that runs longer hangs. Pure."""

from trial_lib.records.candidate import Candidate
from trial_lib.records.result import TrialResult
from trial_lib.wire.step_window import StepWindow
from trial_lib.wire.turned import compiles

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
    """Returns the deadline of a trial in seconds, from the times of the profile trial.

    It is a floor plus five times the start, with its first step, plus five times the window's first steps at the
    profile trial's time per sample. A trial within it may be slow. Filling and moving offloaded states comes on top,
    because the profile trial did not show it. So does a compilation that a switch has turned on.

    Args:
        profile: the result of the profile trial.
        profiled: its candidate.
        candidate: the candidate of this trial.
        window: the steps that the trial measures.
        offloaded: bytes that each of its ranks moves to its host or to a disk.
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
