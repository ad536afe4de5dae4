"""The memory model's prediction of each trial and the trial's actual memory. The model replays the trials in order."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trial_lib.memory.foreseen_bytes import ForeseenArm
from trial_lib.memory.memory_basis import MemoryBasis
from trial_lib.memory.memory_model import MODELLED, MemoryModel, measured_above_initialize
from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.report.study_view import Interval, MemoryView

# After this many trials the predictions hardly differ from the measurements.
_MOST_TRIALS = 400


def memory_views(
    base_config: Mapping[str, Any],
    candidates: Mapping[int, Candidate],
    results: Mapping[int, TrialResult],
    foreseen: Sequence[ForeseenArm] = (),
) -> dict[int, MemoryView]:
    """Returns the prediction for each trial just before its result; nothing without a profile or a known device.

    Args:
        base_config: the user's DeepSpeed configuration, completed.
        candidates: by number.
        results: by number, in the order in which they came.
        foreseen: the arms that the search began with.
    """
    profiles = [(number, result) for number, result in results.items() if result.profile is not None]
    device = device_of(results.values())
    if not profiles or device not in MODELLED:
        return {}
    profiled, profile = profiles[0]
    assert profile.profile is not None
    switches = {place for candidate in candidates.values() for place in candidate.switches}
    slots = candidates[profiled].slots
    model = MemoryModel(MemoryBasis(profile.profile, base_config, slots, device, foreseen), switches)
    model.observe_profile(candidates[profiled], profile)
    views: dict[int, MemoryView] = {}
    for number, result in list(results.items())[:_MOST_TRIALS]:
        if result.purpose is Purpose.PROFILE:
            continue
        candidate = candidates[number]
        expected, left = model.above_initialize(candidate), model.available(candidate)
        completed = result.outcome is Outcome.COMPLETED
        if result.memory.available:
            left = min(result.memory.available)
        views[number] = MemoryView(
            predicted=Interval(expected.value, expected.low, expected.high),
            measured=measured_above_initialize(result.memory) if completed else None,
            budget=left,
        )
        model.observe(candidate, result)
    return views


def device_of(results: Iterable[TrialResult]) -> str:
    """Returns `cuda` or `cpu`; empty if no trial recorded it. Older versions do not record it."""
    return next((result.trained_on for result in results if result.trained_on), "")
