"""dsat's helpers, under the names that training code imports."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trial_lib.deepspeed_config.overrides import get_ds_config_from_hparams as get_ds_config_from_hparams
from trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config as overwrite_deepspeed_config
from trial_lib.training.huggingface_arguments import get_hf_args_with_overwrites as get_hf_args_with_overwrites


@contextmanager
def dsat_reporting_context(core_context: Any, op: Any, steps_completed: int | None = None) -> Iterator[None]:
    """Does nothing. dsat reported the steps through it, and ZeroTune's trials measure the engine itself.

    A step is measured as in any other program, from the end of one to the end of the next. Loading counts, wherever the
    program loads.

    Args:
        core_context: what `core.init` returned.
        op: the current operation.
        steps_completed: the optimizer steps done.
    """
    yield
