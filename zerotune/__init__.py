"""ZeroTune for programs and notebooks: `tune`, `plan`, and what training code imports, such as `DeepSpeedTrial`.

A name is imported when it is asked for. This module itself imports nothing, not even `typing`, because every process of
ZeroTune imports it first, before the command hears signals, and in the user's interpreter as well.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zerotune.api import CommandError as CommandError
    from zerotune.api import Plan as Plan
    from zerotune.api import Study as Study
    from zerotune.api import plan as plan
    from zerotune.api import tune as tune
    from zerotune.trial_lib import *  # noqa: F403

_OF_COMMANDS = ("CommandError", "Plan", "Study", "plan", "tune")


def __getattr__(name: str) -> "Any":
    import importlib

    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("zerotune")
    if name in _OF_COMMANDS:
        return getattr(importlib.import_module("zerotune.api"), name)
    trial_lib = importlib.import_module("zerotune.trial_lib")
    if name not in trial_lib.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(trial_lib, name)


def __dir__() -> list[str]:
    from zerotune import trial_lib

    return sorted([*globals(), *_OF_COMMANDS, *trial_lib.__all__, "__version__"])
