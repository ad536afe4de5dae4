"""DeepSpeed's own activation checkpointing, for code that configures it by the DeepSpeed configuration."""

from typing import Any

from trial_lib.space.effects import Effect, KnownKnob, Surroundings, switch


def _partitioned(here: Surroundings, own: Any) -> tuple[bool, ...]:
    # `checkpointing.configure`: contiguous checkpointing needs partitioned activations.
    contiguous = here.own("activation_checkpointing.contiguous_memory_optimization") is True
    return (True,) if own is True and contiguous else switch(False)(here, own)


def _checkpointing(source: str, **takes: Any) -> tuple[Effect, ...]:
    source = f"activation_checkpointing/checkpointing.py {source}"
    not_read = "your code does not configure activation checkpointing by the DeepSpeed configuration"
    reads = {"holds": lambda here: here.reads_activation_checkpointing, "otherwise": not_read}
    return (Effect(source, **{**reads, **takes}),)


ACTIVATIONS: dict[str, KnownKnob] = {
    "activation_checkpointing.partition_activations": KnownKnob(
        "switch",
        _checkpointing(
            "partition_activations",
            holds=lambda here: here.reads_activation_checkpointing and here.slots > here.replicas,
            otherwise="it takes a model over several devices, whose code configures activation checkpointing by the "
            "DeepSpeed configuration",
            candidates=_partitioned,
        ),
        default=False,
        is_coarse=True,
    ),
    "activation_checkpointing.cpu_checkpointing": KnownKnob(
        "switch",
        _checkpointing("CPU_CHECKPOINT", devices=("cuda",), candidates=switch(False)),
        default=False,
        is_coarse=True,
    ),
    "activation_checkpointing.contiguous_memory_optimization": KnownKnob(
        "switch",
        _checkpointing("CONTIGUOUS_CHECKPOINTING", when={"activation_checkpointing.partition_activations": (True,)}),
        default=False,
        is_coarse=True,
    ),
}
