"""The user's program as its ranks run it: interpreter, environment, command line."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_lib.experiment.entrypoint import arguments_for
from trial_lib.experiment.yaml_file import Experiment
from trial_lib.launch.cold import rank_environment
from trial_lib.launch.program import Program

_TRIAL_CLASS_MODULE = "trial_lib.training"


def program_of(
    experiment: Experiment,
    environment: dict[str, str],
    ds_config_path: Path,
    ds_config: Mapping[str, Any],
    training_spec: Path,
) -> Program:
    """Returns the program of an experiment under one DeepSpeed configuration.

    Args:
        experiment: what the user submitted.
        environment: what its ranks start from (`environment_of`).
        ds_config_path: the file that the configuration stands in.
        ds_config: that configuration.
        training_spec: the file that tells a trial class what to do; a script or a module has no use for it.
    """
    entrypoint = experiment.entrypoint
    if entrypoint.trial_class is not None:
        target, arguments = {"module": _TRIAL_CLASS_MODULE}, [str(training_spec)]
    else:
        target = {"module": entrypoint.module} if entrypoint.module else {"script": entrypoint.script or ""}
        arguments, _ = arguments_for(entrypoint, ds_config_path, experiment.config.arg_mappings, ds_config)
    return Program(
        interpreter=interpreter_of(experiment),
        target=target,
        arguments=arguments,
        passes_local_rank=entrypoint.passes_local_rank,
        model_dir=experiment.model_dir,
        environment=environment,
    )


def interpreter_of(experiment: Experiment) -> str:
    """Returns the Python that runs the user's code: the one they name by a path, else ZeroTune's own."""
    named = experiment.entrypoint.interpreter
    return sys.executable if named is None else str((experiment.model_dir / named).absolute())


def environment_of(experiment: Experiment, include: tuple[Path, ...]) -> dict[str, str]:
    """Returns the environment that ranks start from."""
    environment = {**rank_environment(interpreter_of(experiment)), **experiment.environment_variables}
    if include:
        # The predecessor copies these beside the code; here they become importable from where they stand.
        folders = [str(path.resolve().parent) for path in include]
        environment["PYTHONPATH"] = ":".join([*folders, environment.get("PYTHONPATH", "")]).rstrip(":")
    return environment
