"""Endings: real lack of memory of either kind, wherever it strikes, is known for what it is."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.kit import GIB, Kit
from zerotune.trial_lib.records.result import Outcome

MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A trial that is to run out of memory.

    Attributes:
        place: where, as `models/train.py` has it.
        outcome: what it is.
        planned: further arguments of its plan.
    """

    place: str
    outcome: Outcome
    planned: dict[str, Any] = field(default_factory=dict)


def cases(kit: Kit) -> dict[str, Case]:
    """Returns them by their names."""
    device, host = Outcome.OUT_OF_MEMORY, Outcome.OUT_OF_HOST_MEMORY if kit.is_cuda else Outcome.OUT_OF_MEMORY
    places = ("forward", "backward", "update", "initialize")
    if not kit.is_cuda:
        limit = {"memory_limit": 2 * GIB}
        return {f"in {place}": Case(place, device, limit) for place in places} | {"host": Case("host", host)}
    pieces = {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    limit = {"memory_limit": 8 * GIB}
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    return {
        **{f"in {place}": Case(place, device) for place in places},
        **{f"in {place}, expandable segments": Case(place, device, pieces) for place in places},
        **{f"in {place}, within a limit of 8 GiB": Case(place, device, limit) for place in places},
        "pinned memory": Case("pinned", host),
        "plain memory of the host": Case("host", host),
        "pinned memory, offloading": Case("pinned", host, {"knobs": offload}),
    }


def run(kit: Kit) -> None:
    shape = kit.shape("125m")
    total = kit.host.memory_per_slot
    sentences: dict[str, str] = {}
    for name, case in kit.part_of(cases(kit).items()):
        limit = case.planned.get("memory_limit")
        # Of the host's memory less: what it has is bounded by the program itself. See `models/train.py`.
        wanted = 8 * GIB if case.place in ("pinned", "host") else 2 * (limit or total)
        result = kit.run(shape, "--out_of", case.place, "--bytes", str(wanted), **case.planned)
        sentences[name] = f"{result.outcome.value}: {result.reason}"
        kit.report.figure("sentences", sentences)
        kit.report.check(f"{name}: {case.outcome.value}", result.outcome is case.outcome, sentences[name])
    small = {"memory_limit": 2 * GIB} if kit.is_cuda else {"memory_limit": 900 * MIB}
    kit.completed("a trial within its limit", kit.shape("125m"), **({"memory_limit": 16 * GIB} if kit.is_cuda else {}))
    if kit.is_cuda:
        result = kit.run(kit.shape("1b"), **small)
        said = f"{result.outcome.value}: {result.reason}"
        kit.report.check(
            "a model that its limit cannot hold: out_of_memory", result.outcome is Outcome.OUT_OF_MEMORY, said
        )
    # After all of them the card has to be as it was: nobody's memory is left.
    kit.completed("a trial after all of them", shape)
