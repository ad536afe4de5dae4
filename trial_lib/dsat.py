"""dsat's helpers, under the names that training code imports."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trial_lib.deepspeed_config.overrides import get_ds_config_from_hparams as get_ds_config_from_hparams
from trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config as overwrite_deepspeed_config
from trial_lib.integrations.huggingface_arguments import get_hf_args_with_overwrites as get_hf_args_with_overwrites


@contextmanager
def dsat_reporting_context(core_context: Any, op: Any, steps_completed: int | None = None) -> Iterator[None]:
    """Has a trial measure what is inside, and leave out what is between: forward, backward and step belong inside.

    It may stand around each micro-batch, each optimizer step, or the whole training (`trainer.train()`). In a full
    experiment, and without ZeroTune, it does nothing. The arguments are dsat's, which reported through them;
    here the engine is measured itself.

    Args:
        core_context: what `core.init` returned.
        op: the current operation.
        steps_completed: the optimizer steps done.
    """
    # A rank of a trial has a probe before the user's code runs; no other process has imported the module.
    probe = getattr(sys.modules.get("trial_lib.measure.probe"), "current", None)
    if probe is None:
        yield
        return
    probe.resume()
    try:
        yield
    finally:
        probe.pause()
