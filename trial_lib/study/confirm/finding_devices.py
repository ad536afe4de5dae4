"""What of the devices may have told the trials of a comparison apart: others on them, other cards, clocks held down."""

from collections.abc import Sequence

from trial_lib.launch.device_watch import unusual_reasons
from trial_lib.records.result import TrialResult


def said_of_devices(results: Sequence[TrialResult]) -> list[str]:
    """Returns a sentence for each thing that a person has to know of the trials that were compared.

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
            f"In {len(beside)} of {len(results)} of these trials others computed on the same devices "
            f"({', '.join(names)}): they are slower than they would be alone."
        )
    # Cores are alike, and chosen anew for each trial.
    sets = {tuple(sorted(device.device for device in one.devices if device.model)) for one in results if one.devices}
    if len(sets) > 1:
        said.append(
            f"These trials ran on {len(sets)} different sets of devices, as others held some meanwhile: cards of one "
            "model differ by a few percent."
        )
    held = [one for one in results if _reasons_of(one)]
    if held:
        reasons = sorted({reason for one in held for reason in _reasons_of(one)})
        said.append(f"In {len(held)} of {len(results)} of these trials a clock was held down by {', '.join(reasons)}.")
    return said


def _reasons_of(result: TrialResult) -> list[str]:
    """Returns what has held a device's clock down in a trial, beyond what is usual."""
    return [reason for device in result.devices for reason in unusual_reasons(device)]
