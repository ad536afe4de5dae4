"""Foreseen runs of the rows' programs, in a cache outside the repository."""

import gzip
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from benchmarks.foresee.public_gpus.model_of_row import GRID_ROWS, ROWS, RowProgram
from zerotune.trial_lib.messages import orders
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun, ForeseeOrder
from zerotune.trial_lib.plan.device_memory import live_bytes

CACHE = Path(os.environ.get("FORESEEN_ROWS") or Path.home() / ".cache" / "zerotune" / "foreseen_rows")
"""The variable `FORESEEN_ROWS` puts it elsewhere."""

OLDER = "foreseen by older code"
DEADLINE_S = 600
FEWEST = 16
"""A program of so many layers is run as it is."""
GATHERED = 1.2
"""The least parameters of few layers, as a multiple of those that stage 3 may keep gathered."""
STEPS = 2
# Fewer layers have no room either, if the whole model has none.
_ROOM, _NO_ROOM = 80 * 2**30, 2**30
# With what torch and DeepSpeed import late.
_IMPORTS = (
    "torch._dynamo",
    "torch.testing._internal.distributed.fake_pg",
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",
    "transformers",
    "zerotune.trial_lib.plan.simulate.engine",
    "zerotune.trial_lib.plan.simulate.rank",
)
_TRAINING = Path(__file__).with_name("row_training.py")


@lru_cache
def code() -> str:
    """Returns a mark of the code that foresees: what it finds in small programs.

    Runs with another mark are of older code, of torch, of DeepSpeed, or of a row's program, and are not compared.
    """
    found = []
    for stage, family in ((0, "llama"), (1, "decoder"), (3, "decoder"), (3, "gpt2")):
        config = {**_SMALL.ds_config, "zero_optimization": {"stage": stage}}
        config["zero_optimization"].update({"offload_optimizer": {"device": "cpu"}} if family == "gpt2" else {})
        run = _run(replace(_SMALL, family=family, checkpoints=stage == 3, ds_config=config))
        # Storages are freed in the order of a set, so their events differ from run to run.
        peaks = [(each.name, round(each.peak), *map(round, each.by_kind)) for each in live_bytes(run).moments]
        work: Counter[tuple[str, int, bool]] = Counter()
        for moment, operations in run.operations_by_moment():
            for each in operations:
                of = moment.name, each.kind, each.on_host
                work[of] += round(each.flops) + round(each.moved)
        found.append([run.stopped, peaks, sorted(work.items())])
    return sha256(json.dumps(found).encode()).hexdigest()[:12]


_SMALL = RowProgram(
    family="llama",
    **{"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 512, "tokens": 64},
    **{"is_gated": True, "is_tied": False, "has_positions": False, "checkpoints": False},
    attention="fused",
    micro_batch=2,
    world=4,
    ds_config={
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    },
)


def foreseen(program: RowProgram) -> ForeseenRun:
    """Returns the foreseen run of a program. A run that cannot be foreseen has `stopped`."""
    file = _file(program)
    if file.exists():
        return ForeseenRun.from_json(json.loads(gzip.decompress(file.read_bytes())))
    run = _run(program)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(run.to_json(), default=str)
    if not run.stopped.startswith(("deadline", "no record")):
        file.write_bytes(gzip.compress(text.encode(), 5))
    return ForeseenRun.from_json(json.loads(text))


def _file(program: RowProgram) -> Path:
    return CACHE / code() / f"{program.key}.json.gz"


def pieces_of(program: RowProgram) -> tuple[RowProgram, ...]:
    """Returns the programs to run for a program: itself, or itself with few layers, twice.

    All layers are alike, so bytes and operations are lines in the layers. The fewer of the two has enough parameters
    that stage 3 does not keep all of them gathered.
    """
    if program.layers <= FEWEST:
        return (program,)
    of_layer = program.layer_parameters
    live = program.ds_config["zero_optimization"].get("stage3_max_live_parameters", 1e9)
    gathers = program.ds_config["zero_optimization"]["stage"] == 3
    few = next((few for few in (4, 8) if not gathers or few * of_layer > GATHERED * live), program.layers)
    return (
        tuple(replace(program, layers=layers) for layers in (few, 2 * few)) if 3 * few < program.layers else (program,)
    )


def store_of(rows: Path, own: Path) -> Path:
    """Returns the file for what was found of rows: the committed one for the committed rows, else one in the cache.

    Args:
        rows: a file of rows. Another content has another file.
        own: the committed file.
    """
    if rows.resolve() == ROWS.resolve():
        return own
    if rows.resolve() == GRID_ROWS.resolve():
        return own.with_name(own.name.replace("row_", "grid_"))
    return CACHE / f"{sha256(rows.read_bytes()).hexdigest()[:12]}.{own.name}"


def is_known(program: RowProgram) -> bool:
    """Returns whether the cache has the program's run."""
    return _file(program).exists()


def sized(program: RowProgram, micro_batch: int) -> RowProgram:
    """Returns a program with another micro-batch."""
    config = {**program.ds_config, "train_micro_batch_size_per_gpu": micro_batch}
    return replace(program, micro_batch=micro_batch, ds_config=config)


def _run(program: RowProgram) -> ForeseenRun:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "program.json").write_text(json.dumps(asdict(program)))
        (place / "scratch").mkdir()
        result = place / "run.json"
        order = ForeseeOrder(
            program={"script": str(_TRAINING)},
            arguments=[str(place / "program.json")],
            model_dir=str(_TRAINING.parent),
            scratch=str(place / "scratch"),
            protected_before=time.time(),
            world=program.world,
            ranks_per_host=program.per_node,
            device_bytes=_NO_ROOM if program.is_narrow else _ROOM,
            steps=STEPS,
            result=str(result),
            launched_at=orders.now(),
        )
        # Imports take longer than a run, and a fork has them.
        _import_all()
        child = os.fork()
        if not child:
            _become_the_rank(order, program, place)
        if not _ended(child):
            return ForeseenRun(world=program.world, stopped=f"deadline of {DEADLINE_S} s")
        if not result.exists():
            said = (place / "output.txt").read_text(errors="replace")
            return ForeseenRun(world=program.world, stopped=f"no record: {said[-300:]}")
        return ForeseenRun.from_json(json.loads(result.read_text()))


def _import_all() -> None:
    for name in _IMPORTS:
        importlib.import_module(name)


def _become_the_rank(order: ForeseeOrder, program: RowProgram, place: Path) -> NoReturn:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(program.world), "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**ranks, "MASTER_PORT": "29999"})
    os.chdir(place)
    sys.path.insert(0, str(_TRAINING.parent))
    output = os.open(place / "output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    from zerotune.trial_lib.plan.simulate.rank import run

    # Else torch runs the backward pass in a thread of its own, and a fork has no modes there.
    torch._C._set_multithreading_enabled(False)
    try:
        run(asdict(order), 0)
    finally:
        os._exit(1)


def _ended(child: int) -> bool:
    """Waits for a process, and returns False if it was killed at the deadline."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
