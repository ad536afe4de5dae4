"""What a program writes beside its folder goes to the trial: checkpoints, NVMe swap, shared memory, trackers."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from zerotune.trial_lib.messages import build_times, folders, shared_segments
from zerotune.trial_lib.rank.patching import put, replace, stand_in, when_imported
from zerotune.trial_lib.rank.user_files import UserFiles


def redirect_saved_files(files: UserFiles) -> None:
    """Redirects the files that torch, safetensors and torch's distributed checkpoints write."""

    def to_write(path: Any) -> Any:
        if not isinstance(path, (str, os.PathLike)) or files.is_free(where := files.path_of(path)):
            return path
        if files.is_layered(where):
            return path
        if not (files.is_training or files.has_copy(where) or files.is_old(where)):
            return path
        return files.new_copy(where)

    def to_read(path: Any) -> Any:
        return files.seen(path) if isinstance(path, (str, os.PathLike)) else path

    save, load = torch.save, torch.load
    stand_in("save", save, _with_path(save, 1, "f", to_write))
    stand_in("load", load, _with_path(load, 0, "f", to_read))

    def redirect_safetensors(module: ModuleType) -> None:
        # Functions that the public ones call, so that every name under which a program has them is covered.
        put(module, "serialize_file", _with_path(module.serialize_file, 1, "filename", to_write))

    def redirect_safe_open(module: ModuleType) -> None:
        original: Any = module.safe_open
        stand_in("safe_open", original, _with_path(original, 0, "filename", to_read))

    def redirect_distributed(module: ModuleType) -> None:
        for name, redirected in (("_FileSystemWriter", to_write), ("FileSystemReader", to_read)):
            owner = getattr(module, name, None) or module.FileSystemWriter
            for method in ("__init__", "reset"):
                replace(owner, method, functools.partial(_then_move, redirected))

    # transformers and PEFT take it from the package itself.
    when_imported("safetensors", redirect_safe_open)
    when_imported("safetensors.torch", redirect_safetensors)
    when_imported("torch.distributed.checkpoint.filesystem", redirect_distributed)


def _with_path(
    function: Callable[..., Any], position: int, name: str, redirected: Callable[[Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], redirected(args[position]), *args[position + 1 :])
        elif name in kwargs:
            kwargs[name] = redirected(kwargs[name])
        return function(*args, **kwargs)

    return call


def _then_move(
    redirected: Callable[[Any], Any], method: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    result = method(self, *args, **kwargs)
    if path := getattr(self, "path", None):
        self.path = Path(redirected(path))
    return result


# NVMe swap

_SECTIONS = ("DeepSpeedZeroOffloadParamConfig", "DeepSpeedZeroOffloadOptimizerConfig")


def swap_into_own_folder(scratch: Path, instead: Path | None = None) -> None:
    """Makes DeepSpeed swap to the trial's own folder, or `instead` where the host may not have its `nvme_path`."""

    def with_own_folder(initialize: Any, section: Any, *arguments: Any, **settings: Any) -> None:
        named = settings.get("nvme_path")
        # DeepSpeed itself refuses any other value.
        if settings.get("device") == "nvme" and isinstance(named, str | Path) and named != "auto":
            folder = folders.own_folder(instead or Path(named), scratch)
            folders.note(scratch, folder)
            settings["nvme_path"] = folder
        initialize(section, *arguments, **settings)

    def follow(module: ModuleType) -> None:
        for name in _SECTIONS:
            replace(getattr(module, name), "__init__", with_own_folder)

    when_imported("deepspeed.runtime.zero.offload_config", follow)


# Shared memory and builds


class NotedMemory:
    """The record of the shared memory that one rank's program makes, so that the guard can remove the rest."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        when_imported("multiprocessing.shared_memory", self._follow)

    def note_held(self) -> None:
        if held := shared_segments.held_by([os.getpid()]):
            shared_segments.note(self._scratch, held)

    def _follow(self, module: ModuleType) -> None:
        posix = getattr(module, "_posixshmem", None)
        if posix is not None:
            # Only this module's own reference is replaced. Other users of the extension keep theirs.
            noting = SimpleNamespace(**{**vars(posix), "shm_open": self._noting(posix.shm_open)})
            put(module, "_posixshmem", noting)

    def _noting(self, shm_open: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(shm_open)
        def noting(path: str, flags: int, *arguments: Any, **options: Any) -> int:
            descriptor = shm_open(path, flags, *arguments, **options)
            if flags & os.O_CREAT:
                shared_segments.note(self._scratch, [path.lstrip("/")])
            return descriptor

        return noting


def note_builds(scratch: Path) -> None:
    """Records, from now on, when this process builds a torch extension, such as DeepSpeed's ops."""

    def load_and_note(load: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with build_times.noted(scratch):
            return load(*arguments, **options)

    when_imported("torch.utils.cpp_extension", lambda module: replace(module, "_jit_compile", load_and_note))


# Weights & Biases, MLflow and TensorBoard

# Names of a run or an experiment to resume. An empty store has none.
_OF_A_RUN = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "WANDB_RUN_ID", "WANDB_RESUME")


def install_trackers(scratch: Path, files: UserFiles) -> None:
    """Keeps the trackers of the program away from the user's runs, before the program runs."""
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
    for name in ("lightning.pytorch.cli", "pytorch_lightning.cli"):
        # It refuses the next trial if the last one has left the file.
        when_imported(name, lambda module: put(module.SaveConfigCallback, "setup", lambda *args, **kwargs: None))


def _swap(module: ModuleType, name: str, replacement: Callable[..., Any]) -> None:
    # Replaces a module's function, also in modules of the fork server that have imported it by name.
    original = getattr(module, name)
    stand_in(name, original, functools.wraps(original)(replacement))


def _disable_wandb(module: ModuleType) -> None:
    init = module.init
    _swap(module, "init", lambda *args, **kwargs: init(*args, **{**kwargs, "mode": "disabled"}))
    # It would ask for a key, or store one.
    _swap(module, "login", lambda *args, **kwargs: True)


def _keep_store(store: str, kind: str, module: ModuleType) -> None:
    # Makes every way to name a store (`kind`: tracking or registry) lead to the trial's store.
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
    # Makes a `SummaryWriter` write below the trial's folder.
    def init(original: Callable[..., None], self: Any, log_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        log_dir = kwargs.pop("logdir", log_dir)
        if log_dir is None or not files.is_free(files.path_of(log_dir)):
            log_dir = str(folder / str(log_dir or "runs").lstrip(os.sep))
        original(self, log_dir, *args, **kwargs)

    replace(module.SummaryWriter, "__init__", init)
