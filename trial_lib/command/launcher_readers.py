"""The readers of `deepspeed` and `torchrun`."""

from typing import Any

from trial_lib.command.deepspeed_hosts import deepspeed_slots
from trial_lib.command.launcher_options import followed
from trial_lib.command.launchers import TORCH_LAUNCH, UserLauncher
from trial_lib.command.parse_command import TRIAL_CLASS_MODULE, read_own, take_script
from trial_lib.command.read_options import options_from_environment, read_options
from trial_lib.command.words import Words

# torch/distributed/launch.py has one more option. Without it each rank is told its local rank.
_USE_ENV = "--use_env"
_OLDER = {_USE_ENV: followed(has_value=False)}
_DEVICES = {"auto": "all", "gpu": "gpu", "cpu": "cpu"}


def read_deepspeed(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    """Reads `[options] script.py` behind `deepspeed`."""
    table = launcher.options if words.follows else launcher.yaml_options
    options = read_options(words, launcher.name, table or {})
    name = take_script(words)
    if "--module" in options and name == TRIAL_CLASS_MODULE:
        return read_own(words)
    found: dict[str, Any] = {
        ("module" if "--module" in options else "script"): name,
        "local_rank_option": "" if "--no_local_rank" in options else "--local_rank",
    }
    return {**found, "launched_by": launcher.name, **deepspeed_slots(words, options)} if words.follows else found


def read_torchrun(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    """Reads `[options] script.py` behind `torchrun`. Its options may be spelt with dashes or underscores."""
    options = options_from_environment(words, launcher.name, launcher.options) if words.follows else {}
    is_older = words.program == TORCH_LAUNCH
    table = {**((launcher.options if words.follows else launcher.yaml_options) or {}), **(_OLDER if is_older else {})}
    options.update(read_options(words, launcher.name, table, is_dash_underscore=True))
    found: dict[str, Any] = {("module" if "--module" in options else "script"): take_script(words)}
    if is_older and _USE_ENV not in options:
        found["local_rank_option"] = "--local-rank"
    if not words.follows:
        return found
    count = options.get("--nproc_per_node", "1")
    if count not in _DEVICES and not (count.isdecimal() and int(count) > 0):
        raise words.error(
            f"--nproc_per_node {count} is no number of processes.", "Write a number above 0, gpu, cpu or auto."
        )
    return {**found, "launched_by": launcher.name, "slots": _DEVICES.get(count) or int(count)}
