"""Names DeepSpeed's functions in the trace, while it runs. Everything is put back when it ends."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import record_function

from trial_lib.measure.engine_watch import EngineWatch
from trial_lib.measure.trace.events import PREFIX, REDUCES, WAIT

_SWAPS = "deepspeed.runtime.swap_tensor"
_OF_STATES = ("swap_in_optimizer_state", "swap_out_optimizer_state")
# Functions of DeepSpeed 0.16 to 0.19 that wait for collectives or for drives, with their names in the trace. Of
# asynchronous collectives the profiler shows the beginning only.
_FUNCTIONS = (
    (
        "deepspeed.runtime.zero.partitioned_param_coordinator",
        "PartitionedParameterCoordinator",
        "fetch_sub_module",
        "gathering",
    ),
    (
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
        REDUCES,
    ),
    *(
        (f"{_SWAPS}.{module}", owner, name, "disk")
        for module, owner, names in (
            (
                "partitioned_param_swapper",
                "AsyncPartitionedParameterSwapper",
                ("synchronize_reads", "synchronize_writes", "swap_out_partitioned_params"),
            ),
            ("partitioned_optimizer_swapper", "PartitionedOptimizerSwapper", _OF_STATES),
            ("pipelined_optimizer_swapper", "PipelinedOptimizerSwapper", _OF_STATES),
        )
        for name in names
    ),
)
_CALLS = {"forward": "compute.forward", "backward": "compute.backward"}


@contextlib.contextmanager
def named_scopes(watch: EngineWatch) -> Iterator[None]:
    """Names the parts of an engine's steps in the trace while this is entered."""
    step = "host_update" if updates_on_host(watch.engine) else "update"
    with contextlib.ExitStack() as undo:
        for module, owner, name, scope in _FUNCTIONS:
            # What is not loaded is not used.
            with contextlib.suppress(AttributeError):
                _name(undo, getattr(sys.modules.get(module), owner), name, scope)
        if torch.distributed.is_available():
            _name(undo, torch.distributed.Work, "wait", WAIT)
        watch.parts.scope = lambda part: record_function(PREFIX + _CALLS.get(part, step))
        undo.callback(setattr, watch.parts, "scope", None)
        yield


def updates_on_host(engine: Any) -> bool:
    """Returns whether an engine's optimizer is offloaded. DeepSpeed ignores offloading at some stages."""
    optimizer = engine.optimizer
    return any(bool(getattr(optimizer, name, False)) for name in ("cpu_offload", "offload_optimizer"))


def _name(undo: contextlib.ExitStack, owner: Any, name: str, scope: str) -> None:
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + scope):
            return function(*args, **kwargs)

    setattr(owner, name, named)
    undo.callback(setattr, owner, name, function)
