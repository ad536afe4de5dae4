"""Programs that ask for the CPU, or insist on CUDA. A foreseen run gives them the pretended device."""

import functools
import os
from types import ModuleType
from typing import Any

from trial_lib.intercept.post_import import when_imported


def install() -> None:
    """Makes the Trainer, Accelerate and Lightning take the device. Call it before the user's program runs."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    when_imported("transformers.training_args", _in_the_trainer)
    when_imported("accelerate.state", _in_accelerate)
    for package in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        when_imported(f"{package}.accelerators.cuda", _in_lightning)


def _in_the_trainer(module: ModuleType) -> None:
    arguments_class: Any = module.TrainingArguments
    original = arguments_class.__post_init__

    @functools.wraps(original)
    def check(arguments: Any) -> None:
        """Replaces `TrainingArguments.__post_init__`."""
        for name in ("use_cpu", "no_cuda"):
            if getattr(arguments, name, False):
                setattr(arguments, name, False)
        original(arguments)

    arguments_class.__post_init__ = check


def _in_accelerate(module: ModuleType) -> None:
    state_class: Any = module.PartialState
    original = state_class.__init__

    @functools.wraps(original)
    def init(state: Any, cpu: bool = False, **kwargs: Any) -> None:
        """Replaces `PartialState.__init__`."""
        original(state, cpu=False, **kwargs)

    state_class.__init__ = init


def _in_lightning(module: ModuleType) -> None:
    # It would refuse a device of another name, and set up kernels.
    module.CUDAAccelerator.setup_device = lambda accelerator, device: None
