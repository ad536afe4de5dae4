"""Foreseen runs made by hand: a model of dense layers under every ZeRO stage, with and without offload."""

from typing import Any

from zerotune.trial_lib.messages.foreseen_run import (
    KINDS,
    MOMENTS,
    OPERATIONS,
    PLACES,
    ForeseenRun,
    MemoryEvent,
    Moment,
    Operation,
    Storage,
)

MIB = 2**20


class _Script:
    """Writes the events of a run."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[MemoryEvent] = []
        self.moments: list[Moment] = []
        self.operations: list[Operation] = []

    def begin(self, name: str, step: int = 0, micro_batch: int = 0) -> None:
        self.moments.append(Moment(MOMENTS.index(name), step, micro_batch, len(self.events), len(self.operations)))

    def make(self, size: float, kind: str, place: str = "device") -> int:
        self.storages.append(Storage(int(size), KINDS.index(kind), PLACES.index(place)))
        self.events.append(MemoryEvent(len(self.storages) - 1, 1))
        return len(self.storages) - 1

    def free(self, storage: int) -> None:
        self.events.append(MemoryEvent(storage, 0))

    def do(self, kind: str, flops: float, moved: float, ranks: int = 1, on_host: int = 0) -> None:
        self.operations.append(Operation(OPERATIONS.index(kind), 0, flops, moved, ranks, 0, on_host))


def pretended_run(
    config: dict[str, Any], world: int, micro_batch: int, accumulation: int = 1, parameters: int = 10**9
) -> ForeseenRun:
    """Returns the run of a model in bf16 with Adam: 2 + 2 + 12 bytes a parameter, 64 MiB of activations a sample."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    offloads = zero.get("offload_optimizer", {}).get("device") == "cpu"
    share = [1 / world if stage >= first else 1.0 for first in (3, 2, 1)]
    script = _Script()
    script.begin("initialize")
    script.make(2 * parameters * share[0], "parameter")
    script.make(12 * parameters * share[2], "optimizer", "pinned" if offloads else "device")
    for step in (1, 2):
        script.begin("load", step)
        batch = script.make(micro_batch * 2048 * 8, "input")
        script.begin("forward", step)
        if stage == 3:
            script.do("all_gather", 0.0, 2.0 * parameters, world)
        activations = [script.make(micro_batch * 32 * MIB, "activation") for _ in range(2)]
        script.do("matmul", 2.0 * parameters * 2048 * micro_batch, 2.0 * parameters)
        logits = script.make(micro_batch * 500 * MIB, "activation")
        script.do("loss", 0.0, 2.0 * micro_batch * 500 * MIB)
        script.begin("backward", step)
        gradients = script.make(2 * parameters * share[1], "gradient")
        script.do("matmul", 4.0 * parameters * 2048 * micro_batch, 4.0 * parameters)
        for each in (*activations, logits):
            script.free(each)
        if world > 1:
            script.do("reduce_scatter" if stage >= 2 else "all_reduce", 0.0, 2.0 * parameters, world)
        script.begin("update", step)
        script.do("update", 0.0, 16.0 * parameters * share[2], on_host=int(offloads))
        script.free(gradients)
        script.free(batch)
    return ForeseenRun(
        world=world,
        replicas=world,
        micro_batch=micro_batch,
        accumulation=accumulation,
        tokens=2048,
        parameters=parameters,
        trainable=parameters,
        ds_config=config,
        stage=stage,
        formats=("bfloat16",),
        dtypes=("bfloat16",),
        storages=tuple(script.storages),
        events=tuple(script.events),
        moments=tuple(script.moments),
        operations=tuple(script.operations),
        loading_s=(0.001,),
        seconds=0.1,
    )
