"""The key that DeepSpeed has refused in a rank. The exception carries a sentence on it into the rank's record."""

import contextlib
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from trial_lib.deepspeed_config.deepspeed_check import refusal_behind
from trial_lib.deepspeed_config.deepspeed_refusals import sentence_of
from trial_lib.deepspeed_config.rules import ZERO_KEYS
from trial_lib.device.gpu_architectures import unread_architectures

_SENTENCE = "zerotune_refusal"
# What Python says when DeepSpeed reads an architecture.
_NO_NUMBER = "invalid literal for int()"
# What DeepSpeed says when it keeps parameters in buffers that it needs (partitioned_param_swapper.py, its issue 3062).
_NO_BUFFER = re.compile(r"Not enough buffers \d+ for swapping|already assigned swap buffer id")
_NO_BUFFER_SENTENCE = (
    "DeepSpeed keeps parameters from NVMe in buffers that it needs for others (its issue 3062). Set"
    " `stage3_max_live_parameters: 0` and `stage3_max_reuse_distance: 0`, so that it keeps none."
)
# The first is that of lines of DeepSpeed without words.
_RAN_OUT = re.compile(r"assert \w+_buffers is not None|ran out of swap buffers")
_NO_OPTIMIZER_BUFFER = (
    "DeepSpeed has too few buffers for an optimizer on NVMe. Set `buffer_count` of offload_optimizer to 4 or more, and"
    " to 8 or more with pipeline_read or pipeline_write."
)


@contextlib.contextmanager
def keys_named(ds_config: Any) -> Iterator[None]:
    """Attaches to an exception that the configuration causes the result of `named_refusal`."""
    try:
        yield
    except Exception as error:
        slots = _slots()
        refusal = refusal_behind(error, ds_config, slots) if isinstance(ds_config, Mapping) else None
        if refusal is not None:
            import deepspeed

            what, remedy = sentence_of(refusal, f"DeepSpeed {deepspeed.__version__}", ZERO_KEYS, slots)
            # An exception of a C extension may have no attributes.
            with contextlib.suppress(AttributeError):
                setattr(error, _SENTENCE, f"{what} {remedy}")
        raise


def _slots() -> int:
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def named_refusal(error: BaseException) -> str:
    """Returns what DeepSpeed has refused, the reason and the remedy; empty if unknown."""
    if isinstance(error, ValueError) and _NO_NUMBER in str(error) and (unread := unread_architectures(os.environ)):
        return unread
    if isinstance(error, AssertionError):
        if _NO_BUFFER.search(str(error)):
            return _NO_BUFFER_SENTENCE
        asserted = [place.line or "" for place in traceback.extract_tb(error.__traceback__)[-1:]]
        if _RAN_OUT.search(" ".join([*asserted, str(error)])):
            return _NO_OPTIMIZER_BUFFER
    return str(getattr(error, _SENTENCE, ""))
