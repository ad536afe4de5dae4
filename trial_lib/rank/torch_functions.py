"""torch's data loaders, optimizers and compilations in a trial.

Nothing here imports Dynamo, because the import takes a second that a program without compilation should not pay.
"""

import contextlib
import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerotune.trial_lib.rank import patching
from zerotune.trial_lib.rank.patching import put, when_imported
from zerotune.trial_lib.rank.user_program import may_be_of_the_user

# The compilations of `torch.compile` in this process, and ways to suspend them.


# Keys of `torch._dynamo.utils.counters` that grow when code is compiled. They count functions that Dynamo has traced,
# graphs that it has made, and graphs of compiled autograd.
_COUNTERS = (("frames", "total"), ("stats", "unique_graphs"), ("compiled_autograd", "captures"))

# The name by which compiled code has `__main__` in the globals of other modules (torch/_dynamo/symbolic_convert.py
# import_source).
_KEPT_MAIN = "__import___main__"


def install() -> None:
    """Stops Dynamo from compiling the replacements of an engine's functions, before the program runs."""
    # It compiles a recomputed block, which would be in pieces otherwise.
    compiled = ("model_transforms", "__init__")
    # Looked up now, because the program may change folders later.
    left = [file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in compiled]

    def leave_alone(rules: Any) -> None:
        for name in left:
            rules.add(f"zerotune.trial_lib.rank.{name}")

    patching.when_imported("torch._dynamo.trace_rules", leave_alone)


def compilations() -> int:
    """Returns a number that changes with each compilation in this process; 0 before the first."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters: Any = getattr(dynamo, "counters", {})
    return sum(counters[group][name] for group, name in _COUNTERS if group in counters)


class NewCompilations:
    """Detects the steps in which something is compiled."""

    def __init__(self) -> None:
        self._before = compilations()

    def were_made(self) -> bool:
        before, self._before = self._before, compilations()
        return before != self._before


def can_run_eagerly() -> bool:
    """Returns whether the program can be run without compilation, and compiled again afterwards."""
    return not compilations() or hasattr(torch.compiler, "set_stance")


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Runs compiled functions as written while entered, and keeps their code. RuntimeError within a compiled function.

    Under a dispatch mode such as a FLOP counter, Dynamo would give up a function for good (pytorch/pytorch#190286), or
    refuse one that has to be a single graph.
    """
    # torch < 2.6 does not have it, and would import Dynamo for it.
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def forget_compiled() -> None:
    """Drops all compiled code, so that everything is compiled as in a fresh process.

    Dynamo takes a size that has changed once for a dynamic size, and compiles for sizes of any kind. It also keeps the
    module `__main__` of the first compilation, which is another one when the program is run again.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    dynamo.reset()
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    getattr(getattr(convert, "_import_module", None), "cache_clear", lambda: None)()
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is dict:
            names.pop(_KEPT_MAIN, None)


# torch's data loaders and optimizers in a trial: they follow the candidate.


# The settings of a loader, as torch names them.
WORKERS, PREFETCH, PINNED, PERSISTENT = "num_workers", "prefetch_factor", "pin_memory", "persistent_workers"
# The default that torch gives to a loader with workers (torch/utils/data/dataloader.py).
_PREFETCH = 2
_TRAINER = "transformers.trainer"


class LoaderOrigins:
    """Finds the lines of the user's code that made the data loaders. A loader made from another has the other's."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[weakref.ref[Any] | None, str, bool]] = {}

    def note(self, loader: Any) -> None:
        dataset = getattr(loader, "dataset", None)
        known = self._places.get(id(dataset))
        if known is None or (known[0] is not None and known[0]() is not dataset):
            self._places[id(dataset)] = (_reference(dataset), *_calling_line())

    def of(self, loader: Any) -> tuple[str, bool]:
        """The line (`file:line`, empty if unknown), and whether the Trainer has made the loader."""
        _, line, by_trainer = self._places.get(id(loader.dataset), (None, "", False))
        return line, by_trainer


def _reference(dataset: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(dataset)
    except TypeError:
        return None


def _calling_line() -> tuple[str, bool]:
    frame: FrameType | None = sys._getframe(3)
    by_trainer = False
    while frame is not None:
        name = frame.f_code.co_filename
        by_trainer |= str(frame.f_globals.get("__name__", "")).startswith(_TRAINER)
        if may_be_of_the_user(name) and os.sep + "trial_lib" + os.sep not in name:
            return f"{os.path.relpath(name)}:{frame.f_lineno}", by_trainer
        frame = frame.f_back
    return "", by_trainer


origins = LoaderOrigins()  # those of this process


def install_loaders(settings: Callable[[], Mapping[str, Any]]) -> None:
    """Makes data loaders follow the candidate's settings. A missing one, or None, changes nothing."""
    when_imported("torch.utils.data.dataloader", functools.partial(_follow, settings))


def _follow(settings: Callable[[], Mapping[str, Any]], module: ModuleType) -> None:
    loader_class: Any = module.DataLoader
    original_init, original_iter = loader_class.__init__, loader_class.__iter__

    @functools.wraps(original_init)
    def init(loader: Any, *args: Any, **kwargs: Any) -> None:
        original_init(loader, *args, **kwargs)
        origins.note(loader)

    @functools.wraps(original_iter)
    def read(loader: Any) -> Any:
        wanted = {name: value for name, value in settings().items() if value is not None}
        if wanted and torch.is_grad_enabled():
            apply(loader, wanted)
        return original_iter(loader)

    put(loader_class, "__init__", init)
    put(loader_class, "__iter__", read)


def apply(loader: Any, wanted: Mapping[str, Any]) -> None:
    """Gives a loader, unread or read to its end, settings by torch's names, as its constructor would have."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        # Each worker would give all of the data.
        wanted = {name: value for name, value in wanted.items() if name == PINNED}
    # The class forbids to set some of them once it is made.
    own = vars(loader)
    workers = int(wanted.get(WORKERS, loader.num_workers))
    if workers != loader.num_workers:
        own["_iterator"] = None
    own[WORKERS] = workers
    own[PINNED] = bool(wanted.get(PINNED, loader.pin_memory))
    if workers:
        own[PREFETCH] = int(wanted.get(PREFETCH, loader.prefetch_factor or _PREFETCH))
        own[PERSISTENT] = bool(wanted.get(PERSISTENT, loader.persistent_workers))
    else:
        # Torch refuses them without workers.
        own.update({PREFETCH: None, PERSISTENT: False, "timeout": 0})


# Adam and AdamW: one kernel for all parameters, or the code's own form

FUSED = "fused"  # the setting, as torch names it
# The optimizers that Hugging Face's Trainer has made by its own code. Its option for the optimizer sets their form.
of_the_trainer: "weakref.WeakSet[Any]" = weakref.WeakSet()


def install_fused_adam(settings: Callable[[], Mapping[str, Any]]) -> None:
    """Makes the optimizers follow, before the program runs. Without `fused`, or with None, they stay as they are."""
    for module, name in (("torch.optim.adam", "Adam"), ("torch.optim.adamw", "AdamW")):
        when_imported(module, functools.partial(_follow_fused_adam, settings, name))


def _follow_fused_adam(settings: Callable[[], Mapping[str, Any]], name: str, module: ModuleType) -> None:
    kind: Any = getattr(module, name)
    original = kind.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        if str(sys._getframe(1).f_globals.get("__name__", "")).startswith(_TRAINER):
            of_the_trainer.add(args[0])
        wanted = settings().get(FUSED)
        if wanted is None:
            original(*args, **kwargs)
            return
        call = signature.bind(*args, **kwargs)
        if not wanted:
            # With an explicit False torch would not choose a form by itself. On a GPU it would update the parameters
            # one by one (torch/optim/adam.py `adam`), and no other form of the code would be measured.
            if call.arguments.get("fused"):
                call.arguments["fused"] = None
        elif not call.arguments.get("differentiable"):
            # Torch refuses two forms at once, and a fused one that autograd is to differentiate.
            call.arguments.update(fused=True, foreach=None)
        original(*call.args, **call.kwargs)

    put(kind, "__init__", init)


# Optimizer steps without a DeepSpeed engine

# A program may warm something up so, but not for that many steps.
_MOST = 100


class PlainSteps:
    """Ends a trial that trains without DeepSpeed. Otherwise it would run until its deadline."""

    def __init__(self, refuse: Callable[[str, str], None]) -> None:
        self._refuse = refuse
        self._taken = 0
        # A child that the program forks has a copy of this object, but is not the rank.
        self._process = os.getpid()

    def begin(self) -> None:
        self._hook = register_optimizer_step_post_hook(self._step_ended)

    def end(self) -> None:
        self._hook.remove()

    def _step_ended(self, *_: Any) -> None:
        self._taken += 1
        if self._taken == _MOST and os.getpid() == self._process:
            self._refuse(
                "invalid",
                f"The program has taken {_MOST} optimizer steps without a DeepSpeed engine. It trains without "
                "DeepSpeed. Let it call deepspeed.initialize, or give it the argument that turns DeepSpeed on.",
            )


# Activations that the program recomputes by itself, which its model does not show before it runs

_recomputed = False


def watch_recomputation() -> None:
    """Notes from now on that something is recomputed by torch's functions or DeepSpeed's."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    for owner, name in (
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"),
        (torch.utils.checkpoint.CheckpointFunction, "forward"),
        (checkpointing.CheckpointFunction, "forward"),
        (checkpointing, "non_reentrant_checkpoint"),
    ):
        original = getattr(owner, name, None)
        if original is not None and not hasattr(original, "__wrapped__"):
            put(owner, name, _noted(original, is_method=isinstance(owner, type)))


def has_recomputed() -> bool:
    """Whether something was recomputed since `watch_recomputation`."""
    return _recomputed


def _noted(original: Any, is_method: bool) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        global _recomputed
        _recomputed = True
        return original(*args, **kwargs)

    call.__wrapped__ = original  # type: ignore[attr-defined]
    return staticmethod(call) if is_method else call
