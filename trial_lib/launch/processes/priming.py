"""Primes the fork server: its imports before it forks, and its fitness to fork. Runs in the user's environment.

The server must have one thread, and must not initialise a device's driver. Otherwise its forks hang or fail. Some
modules start a thread, or initialise a driver, when they are imported. The ranks import these modules, and the modules
that import them. The server imports all others once for all trials.
"""

import ast
import contextlib
import importlib
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from pathlib import Path
from typing import Any

from trial_lib.device.host.forks import initialised_driver
from trial_lib.intercept.compile_later import compiled_when_called
from trial_lib.intercept.stand_in import note_names
from trial_lib.launch.processes import channel, config_check, jit_builds, rank_process
from trial_lib.launch.processes.asked_device import asked_by_a_child, count_by_a_child
from trial_lib.launch.processes.cpu_info import remember_cpu_info
from trial_lib.wire.imported import Import, installed_folders

# What ZeroTune itself imports in every rank. By name, because this room is below that one.
_OF_RANKS = ("trial_lib.measure.rank", "trial_lib.measure.sizes")


def prime(driver: socket.socket, builders: list[str]) -> list[str]:
    """Imports the modules of every DeepSpeed training, and those that a first step would load.

    Returns:
        Those of the builders whose ops are loaded. An op that is not built is built when a program needs it.
    """
    # DeepSpeed imports mlflow if it is installed. That takes seconds, which most programs need not pay.
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    import torch

    count_by_a_child(lambda: doubt() is None)
    with asked_by_a_child(lambda: doubt() is None):
        importlib.import_module("deepspeed")

    del sys.modules["mlflow"]
    # The driver waits for this answer, so it comes before the slow steps.
    config_check.answer_waiting(driver, doubt() is None)
    importlib.import_module("deepspeed.ops").__compatible_ops__  # noqa: B018 - computed on first use
    with contextlib.suppress(ImportError), compiled_when_called():
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    for module in _OF_RANKS:
        # A rank of a broken environment meets the same error, and writes it into its record.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))])
    from deepspeed.accelerator import get_accelerator

    remember_cpu_info()
    note_names()

    def note(text: str) -> None:
        channel.send(driver, {"note": text})

    if get_accelerator().device_name() == "cpu":
        cannot = jit_builds.build(builders, note, only_built=True)
        return [name for name in builders if name not in cannot]
    # The ranks load the ops themselves.
    jit_builds.wait_for_the_living()
    # Loading a CUDA op asks the device for its architecture, which initialises CUDA. So a child loads it.
    child = os.fork()
    if child == 0:
        try:
            jit_builds.build(builders, note, only_built=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return []


def doubt() -> str | None:
    """Returns the reason why a fork is not safe now, or None."""
    threads = os.listdir("/proc/self/task")  # noqa: PTH208 - asked after every import
    if len(threads) != 1:
        return f"the fork server has {len(threads)} threads{_named(threads)}"
    driver = initialised_driver()
    return None if driver is None else f"the fork server has initialised {driver}"


def _named(threads: Iterable[str]) -> str:
    """Returns the names of all threads but the first, in brackets. They tell which library started them."""
    names = []
    for thread in threads:
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            if int(thread) != os.getpid():
                names.append(Path("/proc/self/task", thread, "comm").read_text().strip())
    return f" ({', '.join(names)})" if names else ""


class _LeftOutError(BaseException):
    """An import of a module that is left out. It is no ImportError, so that no program takes it for missing."""


class _SpoiltError(BaseException):
    """A module's import has made forks unsafe."""


def import_all(imported: Sequence[Import], left_out: set[str]) -> str | None:
    """Imports modules in their order. A module that fails, or needs one that is left out, is left to the ranks.

    Args:
        imported: the modules that the profile trial had imported, with the variables that its program had set before;
            or statements that import.
        left_out: the modules that must not be imported.

    Returns:
        The module whose import has made forks of this process unsafe, or None.
    """
    # Before any code of the program's own, only what is imported has set variables.
    leads = all(isinstance(each, str) and " " in each for each in imported)
    refused = set(left_out)
    with _watched(refused) as failed, _own_environment(rank_process.set_by_imports if leads else {}):
        for each in imported:
            failed.clear()
            if isinstance(each, dict):
                _set_variables(each)
                continue
            if each in sys.modules:
                continue
            try:
                if " " not in each:
                    importlib.import_module(each)
                elif _is_of_installed(each):
                    exec(each, {})
                else:
                    # The user's own code may set what a later import reads.
                    break
            except _SpoiltError as spoilt:
                return str(spoilt)
            except (Exception, SystemExit, _LeftOutError):  # noqa: BLE001 - the rank that needs it will say so
                failed -= sys.modules.keys()
                _forget_submodules(failed)
                # What needs them would only fail as late, and as often.
                refused |= failed
    note_names()
    return None


def _forget_submodules(packages: Iterable[str]) -> None:
    """Lets a rank import these packages as for the first time.

    Python drops a package whose import fails, but none of its submodules. If such a submodule is there when the package
    is imported again, it is no attribute of the package.
    """
    within = tuple(f"{package}." for package in packages)
    for name in [name for name in sys.modules if name.startswith(within)]:
        del sys.modules[name]


def _is_of_installed(statement: str) -> bool:
    """Returns whether all modules that a statement imports are installed, and not the user's own code."""
    parsed = ast.parse(statement).body[0]
    names = [each.name for each in parsed.names] if isinstance(parsed, ast.Import) else []
    names += [parsed.module or ""] if isinstance(parsed, ast.ImportFrom) else []
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    return all(map(_is_installed, packages))


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A package without an `__init__.py` has folders alone.
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(f"{place}{os.sep}".startswith(installed_folders()) for place in places if place)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _own_environment(changes: dict[str, str]) -> Iterator[None]:
    """Takes back what changes in the environment. Each rank's program changes its own.

    Args:
        changes: gets the variables that were set.
    """
    own = dict(os.environ)
    try:
        yield
    finally:
        changes.update({name: value for name, value in os.environ.items() if own.get(name) != value})
        os.environ.clear()
        os.environ.update(own)


@contextlib.contextmanager
def _watched(left_out: set[str]) -> Iterator[set[str]]:
    """Checks after each module, the innermost first, whether a fork is still safe.

    Yields:
        A set that gets the names of modules whose import fails.
    """
    failed: set[str] = set()

    def refusing(create: Callable[..., Any]) -> Callable[..., Any]:
        def create_module(loader: Any, spec: Any) -> Any:
            if spec.name in left_out:
                raise _LeftOutError(spec.name)
            return create(loader, spec)

        return create_module

    def asking(execute: Callable[..., None]) -> Callable[..., None]:
        def exec_module(loader: Any, module: Any) -> None:
            try:
                execute(loader, module)
            except BaseException:
                failed.add(module.__name__)
                raise
            if doubt():
                raise _SpoiltError(module.__name__)

        return exec_module

    with contextlib.ExitStack() as restored:
        for loader in (SourceFileLoader, ExtensionFileLoader):
            for name, wrap in (("create_module", refusing), ("exec_module", asking)):
                original = getattr(loader, name)
                restored.callback(setattr, loader, name, original)
                setattr(loader, name, wrap(original))
        yield failed
