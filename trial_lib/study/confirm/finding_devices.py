"""Differences between devices that may influence a comparison: other processes, other cards, slower clocks."""

from collections.abc import Sequence

from trial_lib.launch.device_watch import unusual_reasons
from trial_lib.records.result import TrialResult


def said_of_devices(results: Sequence[TrialResult]) -> list[str]:
    """Returns a sentence for each difference between devices that matters for the compared trials.

    Args:
        results: of these trials.
    """
    said = []
    beside = [result for result in results if result.had_company]
    if beside:
        names = sorted(
            {each.name or "a process" for one in beside for device in one.devices for each in device.company}
        )
        said.append(
            f"In {len(beside)} of {len(results)} of these trials other processes computed on the same devices "
            f"({', '.join(names)}). These trials are slower than they would be alone."
        )
    # Cores are alike, and are chosen again for each trial.
    sets = {tuple(sorted(device.device for device in one.devices if device.model)) for one in results if one.devices}
    if len(sets) > 1:
        said.append(
            f"These trials ran on {len(sets)} different sets of devices, because other processes held some meanwhile. "
            "Cards of one model differ by a few percent."
        )
    held = [one for one in results if _reasons_of(one)]
    if held:
        reasons = sorted({reason for one in held for reason in _reasons_of(one)})
        said.append(f"In {len(held)} of {len(results)} of these trials a clock was held down by {', '.join(reasons)}.")
    return said


def _reasons_of(result: TrialResult) -> list[str]:
    """Returns the unusual reasons that slowed a device's clock in a trial."""
    return [reason for device in result.devices for reason in unusual_reasons(device)]
