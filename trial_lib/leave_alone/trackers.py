"""Keeps a trial out of the user's runs in Weights & Biases, MLflow and TensorBoard.

Weights & Biases is disabled. MLflow gets an empty store of the trial's own, whatever address the program names.
TensorBoard's files go to the trial's folder. Each replacement is made when the program imports the tracker, not before.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from trial_lib.intercept.post_import import when_imported
from trial_lib.intercept.stand_in import stand_in
from trial_lib.leave_alone.user_files import UserFiles

# Names of a run or an experiment to resume. An empty store has none.
_OF_A_RUN = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "WANDB_RUN_ID", "WANDB_RESUME")


def install(scratch: Path, files: UserFiles) -> None:
    """Keeps the trackers of the user's program away from the user's runs. Call it before the program runs.

    Args:
        scratch: the trial's folder.
        files: decides which folders are not the user's.
    """
    for name in _OF_A_RUN:
        os.environ.pop(name, None)
    # A store of files, because a database takes seconds to make.
    store = (scratch / "mlruns").absolute().as_uri()
    os.environ.update(
        WANDB_MODE="disabled", MLFLOW_TRACKING_URI=store, MLFLOW_REGISTRY_URI=store, MLFLOW_ALLOW_FILE_STORE="true"
    )
    when_imported("wandb", _disable_wandb)
    for module, kind in (("_tracking_service", "tracking"), ("_model_registry", "registry")):
        when_imported(f"mlflow.tracking.{module}.utils", functools.partial(_keep_store, store, kind))
    when_imported("mlflow.tracking.fluent", _start_new_runs)
    for name in ("torch.utils.tensorboard.writer", "tensorboardX.writer"):
        when_imported(name, functools.partial(_write_elsewhere, scratch / "tensorboard", files))


def _swap(module: ModuleType, name: str, replacement: Callable[..., Any]) -> None:
    """Replaces a module's function, also in modules of the fork server that have imported it by name."""
    original = getattr(module, name)
    stand_in(name, original, functools.wraps(original)(replacement))


def _disable_wandb(module: ModuleType) -> None:
    init = module.init
    _swap(module, "init", lambda *args, **kwargs: init(*args, **{**kwargs, "mode": "disabled"}))
    # It would ask for a key, or store one.
    _swap(module, "login", lambda *args, **kwargs: True)


def _keep_store(store: str, kind: str, module: ModuleType) -> None:
    """Makes every way to name a store (`kind`: tracking or registry) lead to the trial's store."""
    _swap(module, f"set_{kind}_uri", lambda *args, **kwargs: None)
    _swap(module, f"get_{kind}_uri", lambda: store)
    _swap(module, f"_resolve_{kind}_uri", lambda *args, **kwargs: store)


def _start_new_runs(module: ModuleType) -> None:
    start_run, set_experiment = module.start_run, module.set_experiment

    def start_new_run(run_id: Any = None, experiment_id: Any = None, *args: Any, **kwargs: Any) -> Any:
        return start_run(None, None, *args, **{**kwargs, "parent_run_id": None})

    def set_own_experiment(experiment_name: Any = None, experiment_id: Any = None, *args: Any, **kwargs: Any) -> Any:
        return set_experiment(experiment_name or "trial", None, *args, **kwargs)

    _swap(module, "start_run", start_new_run)
    _swap(module, "set_experiment", set_own_experiment)


def _write_elsewhere(folder: Path, files: UserFiles, module: ModuleType) -> None:
    """Makes a `SummaryWriter` write below the trial's folder."""
    original: Callable[..., None] = module.SummaryWriter.__init__

    @functools.wraps(original)
    def init(self: Any, log_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        log_dir = kwargs.pop("logdir", log_dir)
        if log_dir is None or not files.is_free(files.path_of(log_dir)):
            log_dir = str(folder / str(log_dir or "runs").lstrip(os.sep))
        original(self, log_dir, *args, **kwargs)

    module.SummaryWriter.__init__ = init
