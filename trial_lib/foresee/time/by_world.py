"""A foreseen run on another number of ranks. Pure.

What a rank computes for its micro-batch stays. Its share of partitioned states, and the groups of its collectives, do
not.
"""

from dataclasses import replace

from trial_lib.foresee.time.links import COLLECTIVES, DISK
from trial_lib.foresee.time.work import kind_of
from trial_lib.wire.foreseen_run import MOMENTS, ForeseenRun, Operation

# What an operation of the host moves for a number at most: it reads two of 32 bits and writes one. A copy moves one.
_TOUCHED_BYTES, _COPIED_BYTES = 12, 4
_COPIES = ("to_host", "to_device")


def at_world(run: ForeseenRun, replicas: int) -> ForeseenRun:
    """Returns the run with another number of replicas. Its storages stay, and so do not belong to it.

    Args:
        run: of two replicas or more, because one has no collectives that could be scaled.
        replicas: of the model, at least 1. Tensor parallelism stays as it is.

    Raises:
        ValueError: the run has one replica, and more are asked for.
    """
    if replicas == run.replicas:
        return run
    if run.replicas == 1:
        raise ValueError("a run of one replica does not show what several send to each other")
    share, world = run.replicas / replicas, run.world // run.replicas * replicas
    # Stages of a pipeline send to each other in the group of all ranks.
    grown = {run.world: world, run.zero_ranks: replicas * run.sequence_ranks}
    starts = [moment.operation for moment in run.moments]
    names = [MOMENTS[moment.name] for moment in run.moments]
    operations: list[Operation] = []
    moments = []
    for index, moment in enumerate(run.moments):
        end = starts[index + 1] if index + 1 < len(starts) else len(run.operations)
        moments.append(moment._replace(operation=len(operations)))
        for operation in run.operations[moment.operation : end]:
            kind = kind_of(operation)
            if kind in COLLECTIVES:
                ranks = grown.get(operation.ranks, operation.ranks)
                if ranks > 1 or operation.ranks == 1:
                    operations.append(operation._replace(ranks=ranks))
            elif _is_of_a_partition(operation, kind, names[index], run):
                operations.append(operation.with_work(operation.flops * share, operation.moved * share))
            else:
                operations.append(operation)
    return replace(
        run,
        world=world,
        replicas=replicas,
        operations=tuple(operations),
        moments=tuple(moments),
    )


def _is_of_a_partition(operation: Operation, kind: str, moment: str, run: ForeseenRun) -> bool:
    """Whether an operation works on this rank's share of the states: the update, and what is offloaded.

    Stages 1 and 2 move the whole gradient of a parameter that lies in several shares. So what is larger than a share
    stays, whatever the number of ranks.
    """
    if run.stage == 0:
        return False
    if moment == "update":
        return True
    is_offloaded = operation.on_host == 1 or kind in DISK or (kind in _COPIES and moment != "load")
    touched = _COPIED_BYTES if kind in _COPIES else _TOUCHED_BYTES
    return is_offloaded and (not run.parameters or operation.moved <= touched * run.parameters / run.replicas)
