"""What PyTorch's FSDP does otherwise than ZeRO 3, which stands for it: changes of a foreseen run. Pure.

* The root module, with embedding and output layer, stays gathered from the forward pass to the end of the backward
  pass, and so do its gradients (`torch/distributed/fsdp/_runtime_utils.py` does not reshard the root). torchtitan wraps
  both apart, so this does not hold there.
* Without synchronisation, which litgpt, Accelerate and the Trainer choose for all but the last micro-batch of a step,
  gradients are whole on each rank (`FullyShardedDataParallel.no_sync`: "accumulates the full model gradients").
* If all states have 16 bits, there is no second copy of the parameters.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.foresee.public_gpus.model_of_row import RowProgram
from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, ForeseenRun, MemoryEvent, Moment, Storage

_FORWARD, _BACKWARD = MOMENTS.index("forward"), MOMENTS.index("backward")
_BUFFER, _GRADIENT, _OPTIMIZER = (KINDS.index(kind) for kind in ("buffer", "gradient", "optimizer"))
_WITHOUT_SYNC = ("litgpt", "accelerate", "hf trainer")
_WRAPS_ROOT = ("torchtitan",)


def is_fsdp(row: Mapping[str, Any]) -> bool:
    """Returns whether a row's framework is FSDP with full shards on several ranks."""
    return "fsdp" in row["framework"].lower() and row["zero_stage"] == 3 and row["gpus"] > 1


def adjusted(row: Mapping[str, Any], program: RowProgram, run: ForeseenRun) -> ForeseenRun:
    """Returns the run of ZeRO 3 as FSDP would have it; any other run as it is."""
    if not is_fsdp(row):
        return run
    words = row["framework"].lower()
    if program.precision == "pure bf16":
        run = _without_second_copy(run)
    if not any(each in words for each in _WRAPS_ROOT):
        run = _with_root(run, program)
    accumulates = (row.get("grad_accum") or 1) > 1 and any(each in words for each in _WITHOUT_SYNC)
    return _with_whole_gradients(run) if accumulates else run


def _without_second_copy(run: ForeseenRun) -> ForeseenRun:
    share, found = 2 * run.trainable / run.replicas, 0.0
    storages = list(run.storages)
    for index, storage in enumerate(storages):
        if storage.kind == _OPTIMIZER and storage.place == 0 and found < share - storage.size / 2:
            found += storage.size
            storages[index] = storage._replace(size=0)
    return replace(run, storages=tuple(storages))


def _with_root(run: ForeseenRun, program: RowProgram) -> ForeseenRun:
    """Returns a run with the root gathered during both passes, and its gradient until the end of the second."""
    matrix = 2 * program.vocab * program.hidden
    padded = 2 * program.world

    def is_matrix(storage: Storage) -> bool:
        return storage.place == 0 and matrix <= storage.size <= matrix + padded

    # ZeRO 3 gathers each of the root's matrices when it is used.
    storages = tuple(
        each._replace(size=0) if each.kind == _BUFFER and is_matrix(each) else each for each in run.storages
    )
    run = replace(run, storages=storages)
    begins = [place for place, moment in enumerate(run.moments) if moment.name == _FORWARD]
    ends = [place for place, moment in enumerate(run.moments) if moment.name == _BACKWARD]
    for begin, end in zip(begins, ends, strict=False):
        run = _with_storage(run, 2 * program.parameters_outside, _BUFFER, (begin, end))
        run = _kept_to_the_end(run, end, is_matrix)
    return run


def _kept_to_the_end(run: ForeseenRun, place: int, is_matrix: Any) -> ForeseenRun:
    """Returns a run in which the first gradient of the root that a backward pass makes lives until its end."""
    first, end = _events_of(run, place)
    events = list(run.events)
    for index in range(first, end):
        storage, is_made = events[index]
        if is_made and is_matrix(run.storages[storage]) and run.storages[storage].kind != _BUFFER:
            freed = MemoryEvent(storage, 0)
            if freed in events[index:end]:
                gone = events.index(freed, index, end)
                events.insert(end - 1, events.pop(gone))
            break
    return replace(run, events=tuple(events))


def _with_whole_gradients(run: ForeseenRun) -> ForeseenRun:
    """Returns a run with all gradients in 16 bits from the end of a micro-batch to the end of the next."""
    backward = [place for place, moment in enumerate(run.moments) if moment.name == _BACKWARD]
    for before, after in itertools.pairwise(backward):
        if run.moments[before].step == run.moments[after].step:
            # ZeRO 3 has this rank's share of them already.
            whole = 2 * run.trainable * (run.replicas - 1) // run.replicas
            run = _with_storage(run, whole, _GRADIENT, (before + 1, after))
    return run


def _with_storage(run: ForeseenRun, size: int, kind: int, lives: tuple[int, int]) -> ForeseenRun:
    """Returns a run with one more storage, which lives from the begin of a moment to the end of another."""
    begin, end = _events_of(run, lives[0])[0], _events_of(run, lives[1])[1]
    index = len(run.storages)
    events = (
        *run.events[:begin],
        MemoryEvent(index, 1),
        *run.events[begin:end],
        MemoryEvent(index, 0),
        *run.events[end:],
    )

    def moved(place: int, moment: Moment) -> Moment:
        return moment._replace(event=moment.event + (place > lives[0]) + (place > lives[1]))

    moments = tuple(moved(place, moment) for place, moment in enumerate(run.moments))
    return replace(run, storages=(*run.storages, Storage(size, kind, 0)), events=events, moments=moments)


def _events_of(run: ForeseenRun, place: int) -> tuple[int, int]:
    """Returns a moment's first event and the one after its last."""
    return run.moments[place].event, run.moments[place + 1].event if place + 1 < len(run.moments) else len(run.events)
