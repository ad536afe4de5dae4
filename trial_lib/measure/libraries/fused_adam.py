"""torch's Adam and AdamW follow the candidate: one kernel for all parameters, or the code's own form.

The arithmetic is the same up to rounding. DeepSpeed keeps the optimizer of the code at every ZeRO stage, and gives it
the flat parts of the parameters instead.
"""

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from trial_lib.intercept.post_import import when_imported

FUSED = "fused"
"""The setting, as torch names it."""

of_the_trainer: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The optimizers that Hugging Face's Trainer has made by its own code. Its option for the optimizer sets their form."""

_TRAINER = "transformers.trainer"


def install(settings: Callable[[], Mapping[str, Any]]) -> None:
    """Makes the optimizers follow. Call it before the user's program runs.

    Args:
        settings: returns the candidate's settings. True in `fused` asks for the fused form, False for no fused form.
            If it is missing, or None, an optimizer stays as the code has it.
    """
    for module, name in (("torch.optim.adam", "Adam"), ("torch.optim.adamw", "AdamW")):
        when_imported(module, functools.partial(_follow, settings, name))


def _follow(settings: Callable[[], Mapping[str, Any]], name: str, module: ModuleType) -> None:
    kind: Any = getattr(module, name)
    original = kind.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        """Replaces the constructor."""
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

    kind.__init__ = init
