"""The pretended world: a process group of N ranks in which only rank 0 exists (torch's fake process group)."""

import functools
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import RecvGrad
from deepspeed.runtime.utils import PartitionedTensor
from torch.distributed import distributed_c10d

from trial_lib.foresee.inside import pretended_device
from trial_lib.intercept.stand_in import stand_in


def install(world: int) -> None:
    """Makes every process group that the program asks for a pretended one. Call it before the program runs.

    Args:
        world: its ranks.
    """
    from torch.testing._internal.distributed import fake_pg

    original = torch.distributed.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        """Replaces `torch.distributed.init_process_group`."""
        original(backend="fake", store=fake_pg.FakeStore(), rank=0, world_size=world)

    stand_in("init_process_group", original, init_process_group)
    original_group = torch.distributed.new_group

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Replaces `torch.distributed.new_group`."""
        kept = {name: kwargs[name] for name in ("use_local_synchronization", "group_desc") if name in kwargs}
        return original_group(ranks, backend="fake", **kept)

    stand_in("new_group", original_group, new_group)

    def meets_at_once(*args: Any, **kwargs: Any) -> None:
        """Replaces barriers: the other ranks are there."""

    for name in ("barrier", "monitored_barrier"):
        stand_in(name, getattr(distributed_c10d, name), meets_at_once)
    stand_in("batch_isend_irecv", distributed_c10d.batch_isend_irecv, _each_by_itself)
    _receive_from_next_stage()


def _each_by_itself(p2p_op_list: list[Any]) -> list[Any]:
    """Replaces `torch.distributed.batch_isend_irecv`, which looks for a backend of the device."""
    return [each.op(each.tensor, each.peer, group=each.group, tag=each.tag) for each in p2p_op_list]


def _receive_from_next_stage() -> None:
    """Lets a stage of a pipeline know how a gradient is divided over its ranks of tensor parallelism.

    The next stage sends that along. It is the division of the activation, which has the same shape.
    """
    receive = PipelineEngine._INSTRUCTION_MAP[RecvGrad]

    @functools.wraps(receive)
    def received(engine: Any, buffer_id: int) -> None:
        receive(engine, buffer_id)
        if engine.is_pipe_partitioned and engine.is_grad_partitioned:
            division = engine.pipe_buffers["outputs"][buffer_id][0]
            engine.grad_partition_grad_layer_meta_cache = division.to("cpu")

    PipelineEngine._INSTRUCTION_MAP[RecvGrad] = received
    # DeepSpeed took this default from the host's own accelerator, when it was imported.
    PartitionedTensor.from_meta.__func__.__defaults__ = (pretended_device.NAME,)
