"""The parts of a step of a pipeline: DeepSpeed's engine for pipelines executes a schedule of instructions.

Rank 0 has the first stage. Other stages have other layers, and hold the tensors of fewer micro-batches.
"""

import functools
from collections.abc import Callable
from typing import Any

from trial_lib.foresee.inside import memory_log

# By the names of the instructions in deepspeed/runtime/pipe/schedule.py. All others move tensors between stages.
_MOMENTS = {
    "LoadMicroBatch": memory_log.LOAD,
    "ForwardPass": memory_log.FORWARD,
    "BackwardPass": memory_log.BACKWARD,
    "OptimizerStep": memory_log.UPDATE,
}


def is_pipeline(engine: Any) -> bool:
    """Returns whether an engine executes a schedule of instructions."""
    return hasattr(engine, "_INSTRUCTION_MAP")


def watch(engine: Any, begin: Callable[[int], None], stepped: Callable[[int], None]) -> None:
    """Follows an engine from now on.

    Args:
        engine: of a pipeline.
        begin: begins a moment, by its index in `MOMENTS`.
        stepped: called after each optimizer step, with the number of steps.
    """

    def watched(instruction: Any, execute: Callable[..., Any]) -> Callable[..., Any]:
        moment = _MOMENTS.get(instruction.__name__, memory_log.BETWEEN)

        @functools.wraps(execute)
        def executed(*args: Any, **kwargs: Any) -> Any:
            steps = engine.global_steps
            begin(moment)
            out = execute(*args, **kwargs)
            begin(memory_log.BETWEEN)
            if engine.global_steps > steps:
                stepped(engine.global_steps)
            return out

        return executed

    engine._INSTRUCTION_MAP = {each: watched(each, execute) for each, execute in engine._INSTRUCTION_MAP.items()}


def note_of(engine: Any) -> str:
    """Returns the sentence for the reader of a run."""
    return f"The run is that of the first of {engine.num_stages} stages of the pipeline. The others have other layers."
