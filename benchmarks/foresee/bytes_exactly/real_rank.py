"""One real rank of the comparison: the program on a CPU, with the tracker of foreseen runs on its real tensors.

`python -m benchmarks.foresee.bytes_exactly.real_rank ORDER`, with torchrun's variables. ORDER is a JSON file with the
program, its arguments, the number of steps and the file for the record.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.simulate.engine_moments import PATCHES, EngineMoments, name_gradients, name_kinds
from zerotune.trial_lib.plan.simulate.logs import MemoryLog, OperationLog
from zerotune.trial_lib.rank.interception import intercept
from zerotune.trial_lib.rank.patching import install
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.rank.user_program import run_program


class RealTensors(TorchDispatchMode):
    """Runs every operator as it is, and notes the storages of its results."""

    def __init__(self, memory: MemoryLog) -> None:
        super().__init__()
        self.in_engine = False
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                self._memory.made(each)
        return out


class RealRun:
    """Observes `deepspeed.initialize`, and writes the record after the last step."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._memory = MemoryLog("cpu")
        self._mode = RealTensors(self._memory)
        self._moments = EngineMoments(self._mode, self._memory, OperationLog(), self._stepped)
        self._engine: Any = None

    def install(self) -> None:
        """Enters the mode."""
        intercept({}, ProgramFacts(), self)
        install(PATCHES, self._moments)
        self._mode.__enter__()

    @property
    def has_engine(self) -> bool:
        """Whether the engine exists."""
        return self._engine is not None

    def initialize_called(self) -> None:
        """Does nothing."""

    def frozen_engine_built(self) -> None:
        """Does nothing."""

    def group_destroyed(self) -> None:
        """Does nothing."""

    def engine_built(self, engine: Any) -> None:
        """Follows the engine."""
        self._engine = engine
        name_kinds(engine, self._memory)
        name_gradients(engine, self._memory)
        self._moments.watch(engine)

    def _stepped(self, steps: int) -> None:
        name_kinds(self._engine, self._memory)
        if steps < self._order["steps"]:
            return
        storages, events, moments = self._memory.record()
        if torch.distributed.get_rank() == 0:
            record = ForeseenRun(
                world=torch.distributed.get_world_size(), storages=storages, events=events, moments=moments
            )
            write_whole(Path(self._order["result"]), json.dumps(record.to_json()))
        torch.distributed.barrier()
        os._exit(0)


def main() -> None:
    """Runs the rank."""
    order = json.loads(Path(sys.argv[1]).read_text())
    RealRun(order).install()
    run_program({"script": order["script"]}, order["arguments"])


if __name__ == "__main__":
    main()
