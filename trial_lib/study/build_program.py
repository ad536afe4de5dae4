"""The user's program as ranks run it: interpreter, environment and command line."""

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trial_lib.command.launchers import launcher_named
from trial_lib.command.mapping_targets import is_variable
from trial_lib.command.parse_command import TRIAL_CLASS_MODULE
from trial_lib.command.program_code import leading_imports, module_file
from trial_lib.command.switches import SwitchValue, text_of
from trial_lib.command.trial_command import trial_command
from trial_lib.device.host.this_host import kind_of
from trial_lib.experiment.read_experiment import Experiment
from trial_lib.launch.cold import rank_environment
from trial_lib.launch.program import Program
from trial_lib.study.opening.build_folder import with_build_folder
from trial_lib.study.wrapped_command import rewrapped
from trial_lib.wire.training_spec import SPEC_VARIABLE


def program_of(
    experiment: Experiment,
    environment: dict[str, str],
    ds_config_path: Path,
    ds_config: Mapping[str, Any],
    training_spec: Path,
    arg_mappings: Mapping[Any, str] | None = None,
    as_typed: bool = False,
    switches: Mapping[str, SwitchValue] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Program:
    """Returns the program of an experiment under one DeepSpeed configuration.

    Args:
        experiment: what the user submitted.
        environment: the environment of its ranks, from `environment_of`.
        ds_config_path: the file of the configuration.
        ds_config: the configuration.
        training_spec: the file that a trial class, or a script with the Core API, reads its task from.
        arg_mappings: the option, variable or place in a file that sets each DeepSpeed key. None uses the experiment's.
        as_typed: whether the command stays as it is. The configuration that it names is still replaced if the
            experiment overwrites a part of it.
        switches: the values of the program's switches, by their places. A trial class has variables only.
        check: called repeatedly while a wrapper runs once more. Its error ends the waiting.

    Raises:
        InputError: with this configuration a wrapper starts another command, or none.
        TimeoutError: a wrapper starts nothing for long.
    """
    entrypoint = experiment.entrypoint
    mappings = experiment.config.arg_mappings if arg_mappings is None else arg_mappings
    files: dict[str, str] = {}
    varied = _variables(switches or {}, entrypoint.arguments, environment)
    before = environment
    if entrypoint.trial_class is not None:
        target, arguments = {"module": TRIAL_CLASS_MODULE}, [str(training_spec)]
        environment = {**environment, **varied}
    elif as_typed and not experiment.config.hyperparameters.overwrite_deepspeed_args:
        target, arguments = _target_of(experiment), list(entrypoint.arguments)
        environment = {**environment, SPEC_VARIABLE: str(training_spec)}
    else:
        target = _target_of(experiment)
        folder = experiment.model_dir
        entrypoint, mappings = rewrapped(entrypoint, ds_config_path, mappings, ds_config, folder, check)
        command = trial_command(entrypoint, ds_config_path, mappings, ds_config, environment, folder, switches)
        arguments, files = command.arguments, command.files
        environment = {**environment, **command.variables, SPEC_VARIABLE: str(training_spec)}
    return Program(
        interpreter=interpreter_of(experiment),
        target=target,
        arguments=arguments,
        local_rank_option=entrypoint.local_rank_option,
        model_dir=experiment.model_dir,
        environment=environment,
        launched_by=entrypoint.launched_by,
        files=files,
        # Libraries read some variables when they are imported, and the fork server has imported them.
        starts_cold=any(before.get(name) != value for name, value in varied.items()),
    )


def _variables(
    switches: Mapping[str, SwitchValue], arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment variables among the switches, with their values as text."""
    return {
        place: text_of(value, environment.get(place, ""))
        for place, value in switches.items()
        if value is not None and is_variable(place, arguments)
    }


def _target_of(experiment: Experiment) -> dict[str, str]:
    entrypoint = experiment.entrypoint
    return {"module": entrypoint.module} if entrypoint.module else {"script": entrypoint.script or ""}


class CommandChanges:
    """Logs the changes that trials make in the user's command. All other words stay as typed.

    The first change of each word goes to the terminal, and every change to the log's file.

    Args:
        experiment: what the user submitted.
        environment: the environment of its ranks.
        log: the study's log.
    """

    def __init__(self, experiment: Experiment, environment: Mapping[str, str], log: logging.Logger) -> None:
        self._experiment = experiment
        self._environment = environment
        self._log = log
        self._told: set[str] = set()

    def tell(
        self,
        number: int,
        ds_config_path: Path,
        ds_config: Mapping[str, Any],
        arg_mappings: Mapping[Any, str],
        switches: Mapping[str, SwitchValue],
    ) -> None:
        """Logs the changes of one trial.

        Args:
            number: the trial's.
            ds_config_path: the file of its configuration.
            ds_config: the configuration.
            arg_mappings: the option, variable or place in a file that sets each DeepSpeed key.
            switches: the values of the program's switches, by their places.
        """
        entrypoint = self._experiment.entrypoint
        if entrypoint.trial_class is not None:
            return
        folder = self._experiment.model_dir
        environment = self._environment
        entrypoint, mappings = rewrapped(entrypoint, ds_config_path, arg_mappings, ds_config, folder)
        command = trial_command(entrypoint, ds_config_path, mappings, ds_config, environment, folder, switches)
        for old, new in command.changes:
            what = old or re.split("[ =]", new)[0]
            is_known = what in self._told
            self._told.add(what)
            said = f"{old} -> {new}" if old else f"{new} is added"
            level = logging.DEBUG if is_known else logging.INFO
            self._log.log(level, "trial %04d, in the command: %s", number, said)


def leading_imports_of(experiment: Experiment, environment: Mapping[str, str]) -> list[str]:
    """Returns the imports by which the user's code begins, for a fork server that runs them ahead.

    Args:
        experiment: what the user submitted.
        environment: of the ranks.
    """
    entrypoint, folder = experiment.entrypoint, experiment.model_dir
    named = environment.get("PYTHONPATH", "").split(os.pathsep)
    folders = [folder, *(folder / each for each in named if each)]
    module = entrypoint.module or (entrypoint.trial_class or "").partition(":")[0]
    if "." in module:
        # Python runs the code of its packages before.
        return []
    file = module_file(module, folders) if module else folder / (entrypoint.script or "")
    # Python looks beside the script itself, if this is a link to it.
    return [] if file is None else leading_imports(file, [file.resolve().parent, *folders])


def interpreter_of(experiment: Experiment) -> str:
    """Returns the Python that runs the user's code: the one that the command names by a path, or ZeroTune's own."""
    named = experiment.entrypoint.interpreter
    return sys.executable if named is None else str((experiment.model_dir / named).absolute())


def environment_of(experiment: Experiment, include: tuple[Path, ...], device: str) -> dict[str, str]:
    """Returns the environment of ranks.

    Args:
        experiment: what the user submitted.
        include: files and folders that the code imports from outside the model directory.
        device: `cuda` or `cpu`.
    """
    interpreter = interpreter_of(experiment)
    environment = {
        **rank_environment(interpreter, has_one_thread(experiment, device)),
        **experiment.environment_variables,
        **experiment.entrypoint.launcher_environment,
    }
    environment = with_build_folder(environment, interpreter)
    if include:
        # Determined copies these files beside the code. Here ranks import them from where they are.
        folders = [str(path.resolve().parent) for path in include]
        environment["PYTHONPATH"] = os.pathsep.join([*folders, environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return environment


def has_one_thread(experiment: Experiment, device: str) -> bool:
    """Returns whether each rank gets one OpenMP thread if the user does not set a number.

    On a CPU a rank has one core. On GPUs ZeroTune does as the user's launcher does. `torchrun` sets one thread if it
    starts several processes (torch/distributed/run.py), and so does `accelerate launch`, because it starts torchrun.
    `deepspeed` and `python` leave all cores to each process, and an offloaded optimizer computes on them.

    Args:
        experiment: what the user submitted.
        device: `cuda` or `cpu`.
    """
    if kind_of(device).computes_on_the_processor:
        return True
    launcher = launcher_named(experiment.entrypoint.launched_by)
    return launcher.gives_one_thread and experiment.config.resources.slots_per_trial > 1
