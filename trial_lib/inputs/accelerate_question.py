"""Asks accelerate what `accelerate launch` would start.

ZeroTune runs this file with `python -c` in the user's interpreter, with the words behind `accelerate launch`. So the
user's version of accelerate reads the options, the configuration files and the ACCELERATE_* variables. The program
prints one line of JSON and starts nothing. It needs the standard library and accelerate only.
"""

import argparse
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

# accelerate.commands.launch calls one of these to start the processes.
_DEEPSPEED, _SEVERAL, _ONE = "deepspeed_launcher", "multi_gpu_launcher", "simple_launcher"
_OTHERS = ("tpu_launcher", "tpu_pod_launcher", "sagemaker_launcher")


def answer(words: list[str]) -> dict[str, Any]:
    """Returns `{"error": sentence}` if accelerate refuses the command.

    Otherwise `launcher` is the function of accelerate that would start it, and `settings` are the options together with
    the configuration file. `given` has the option of each setting that the command sets. `arguments` are the script's.
    `variables` are those that the launcher would add to the environment or change in it.
    """
    try:
        launch: Any = importlib.import_module("accelerate.commands.launch")
    except ImportError as error:
        return {"error": f"accelerate cannot be imported by {sys.executable} ({error})"}
    found: dict[str, Any] = {}

    def record(name: str) -> Callable[..., None]:
        return lambda *args: found.update(launcher=name, settings=args[-1])

    for name in (_DEEPSPEED, _SEVERAL, _ONE, *_OTHERS):
        setattr(launch, name, record(name))
    try:
        parser = launch.launch_command_parser()
        parser.error = _refuse
        launch.launch_command(parser.parse_args(words))
        settings = found["settings"]
        # accelerate checks that its port is free. Any free port will do.
        settings.main_process_port = _free_port()
        variables = _variables(launch, found["launcher"], settings)
    except SystemExit:
        return {"error": "its options ask for help, not for a training"}
    except Exception as error:  # noqa: BLE001 - whatever accelerate says about the command is the answer
        return {"error": " ".join(str(error).split()) or type(error).__name__}
    return {
        "launcher": found["launcher"],
        "settings": {
            name: value
            for name, value in vars(settings).items()
            if value is None or isinstance(value, bool | int | float | str)
        },
        "given": _given(parser, settings),
        "arguments": list(settings.training_script_args),
        "variables": {name: value for name, value in variables.items() if os.environ.get(name) != value},
    }


def _variables(launch: Any, launcher: str, settings: argparse.Namespace) -> dict[str, str]:
    # The environment of the processes that accelerate would start. Empty if ZeroTune refuses the command.
    if (settings.num_machines or 1) > 1:
        return {}
    if launcher == _DEEPSPEED:
        return dict(launch.prepare_deepspeed_cmd_env(settings)[1])
    if launcher == _SEVERAL:
        return dict(launch.prepare_multi_gpu_env(settings))
    return dict(launch.prepare_simple_launcher_cmd_env(settings)[1]) if launcher == _ONE else {}


def _given(parser: argparse.ArgumentParser, settings: argparse.Namespace) -> dict[str, str]:
    given: set[str] = getattr(settings, "nondefault", set())
    return {
        action.dest: action.option_strings[0]
        for action in parser._actions
        if action.dest in given and action.option_strings
    }


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    # `accelerate launch` does not import from the working directory either.
    sys.path[:] = [folder for folder in sys.path if folder]
    print(json.dumps(answer(sys.argv[1:])))
