"""Trains as `trainer.py` does, by an Accelerate that has FSDP on CPU ranks too, as it has on GPUs."""

from typing import Any

import trainer
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState

original = AcceleratorState.__init__


def with_fsdp(state: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    original(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


AcceleratorState.__init__ = with_fsdp

if __name__ == "__main__":
    trainer.main()
