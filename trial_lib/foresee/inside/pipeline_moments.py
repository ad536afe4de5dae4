"""The parts of a step of a pipeline: DeepSpeed's engine for pipelines executes a schedule of instructions.

Rank 0 has the first stage. Other stages have other layers, and hold the tensors of fewer micro-batches.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from trial_lib.foresee.inside import memory_log
from trial_lib.foresee.inside.asks import CannotForeseeError

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


def watch(engine: Any, begin: Callable[[int, int], None], stepped: Callable[[int], None]) -> None:
    """Follows an engine from now on.

    The forward pass of a micro-batch begins before the backward pass of an earlier one has. So each kind of instruction
    is counted by itself. What follows an instruction belongs to its micro-batch, and reductions to the last one.

    Args:
        engine: of a pipeline.
        begin: begins a moment, by its index in `MOMENTS` and that of its micro-batch in the step.
        stepped: called after each optimizer step, with the number of steps.

    Raises:
        CannotForeseeError: the schedule is another one.
    """
    if type(engine).__name__ == "DualPipeVEngine":
        raise CannotForeseeError(
            "DualPipeV cannot be foreseen, because each of its ranks has two stages and exchanges tensors both ways."
        )
    executions: Counter[str] = Counter()
    last = 0

    def micro_batch_of(name: str) -> int:
        nonlocal last
        if name.startswith("Reduce") or name == "OptimizerStep":
            last = engine.gradient_accumulation_steps() - 1
        else:
            last = executions[name]
            executions[name] += 1
        return last

    def watched(instruction: Any, execute: Callable[..., Any]) -> Callable[..., Any]:
        moment = _MOMENTS.get(instruction.__name__, memory_log.BETWEEN)

        @functools.wraps(execute)
        def executed(*args: Any, **kwargs: Any) -> Any:
            nonlocal last
            if not torch.is_grad_enabled():
                # An evaluation executes the same instructions.
                return execute(*args, **kwargs)
            steps = engine.global_steps
            begin(moment, micro_batch_of(instruction.__name__))
            out = execute(*args, **kwargs)
            if engine.global_steps > steps:
                executions.clear()
                last = 0
            begin(memory_log.BETWEEN, last)
            if engine.global_steps > steps:
                stepped(engine.global_steps)
            return out

        return executed

    engine._INSTRUCTION_MAP = {each: watched(each, execute) for each, execute in engine._INSTRUCTION_MAP.items()}


def parameters_of(engine: Any) -> tuple[int, int] | None:
    """Returns the parameters of all stages, and of these the trained ones; None if a layer cannot be built here.

    Rank 0 has the layers of the first stage alone. It knows how the others are built, and torch's meta device makes
    them without memory, as no part of the run.
    """
    found: dict[int, nn.Parameter] = {}
    tied: set[str] = set()
    built = []
    for layer in engine.module._layer_specs:
        key = getattr(layer, "key", None)
        if key is not None and key in tied:
            continue
        tied |= set() if key is None else {key}
        if not isinstance(layer, nn.Module) and hasattr(layer, "build"):
            try:
                layer = _built(layer)
            except Exception:  # noqa: BLE001 - whatever the user's layer needs, it is only missing in a count
                return None
        if isinstance(layer, nn.Module):
            # Kept, so that no other parameter gets its id.
            built.append(layer)
            found |= {id(each): each for each in layer.parameters()}
    numbers = [(each.numel(), each.requires_grad) for each in found.values()]
    return sum(number for number, _ in numbers), sum(number for number, is_trained in numbers if is_trained)


def _built(spec: Any) -> Any:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("meta"))
        return spec.build()


def note_of(engine: Any, are_counted: bool) -> str:
    """Returns the sentences for the reader of a run.

    Args:
        engine: of a pipeline.
        are_counted: whether the parameters of all stages are known.
    """
    said = f"The run is that of the first of {engine.num_stages} stages of the pipeline. The others have other layers."
    return (
        said if are_counted else f"{said} A layer cannot be built apart, so only this stage's parameters are counted."
    )
