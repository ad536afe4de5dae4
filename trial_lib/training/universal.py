"""A checkpoint for another number of ranks: the states that ZeRO divided are joined and divided again.

DeepSpeed loads ZeRO's states only as they were divided. Its universal checkpoints hold each parameter and its optimizer
states whole. `deepspeed.checkpoint.ds_to_universal` makes one of a checkpoint, and an engine with a setting reads it.
Without ZeRO (stage 0) every rank has everything, and nothing is converted.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trial_lib.training.checkpoints import Checkpoint
from trial_lib.training.distributed import DistributedContext, InvalidTrialError, must_be_seen, on_rank_0
from trial_lib.training.model_parallel import is_pipeline

_CONVERTER = "deepspeed.checkpoint.ds_to_universal"
_DIVIDED = "_optim_states.pt"
"""The ending of the files with a rank's part of ZeRO's optimizer states."""


@contextmanager
def loadable(checkpoint: Checkpoint, engines: Sequence[Any], distributed: DistributedContext) -> Iterator[Path]:
    """Yields the folder from which these engines load a checkpoint. Call it on all ranks.

    It is the checkpoint's own if as many ranks saved it. If not, it is a converted copy, which is removed afterwards.

    Raises:
        InvalidTrialError: this number of ranks cannot resume from it; on all ranks.
        OSError: the copy cannot be written, or a rank does not see it; on all ranks.
    """
    problem = world_size_problem(checkpoint, distributed.size, engines)
    if problem is not None:
        raise InvalidTrialError(problem)
    if checkpoint.world_size == distributed.size:
        yield checkpoint.path
        return
    copy = convert(checkpoint, distributed)
    with loading_universal(engines):
        yield copy
    distributed.barrier()
    on_rank_0(distributed, lambda: shutil.rmtree(copy, ignore_errors=True))


def world_size_problem(checkpoint: Checkpoint, world_size: int, engines: Sequence[Any]) -> str | None:
    """Why a number of ranks cannot resume from a checkpoint, and the remedy."""
    if checkpoint.world_size == world_size:
        return None
    reasons = [reason for reason in map(_hindrance, engines) if reason is not None]
    if not reasons:
        return None
    plural = "" if checkpoint.world_size == 1 else "s"
    return (
        f"{checkpoint.path} was saved by {checkpoint.world_size} rank{plural} and cannot be loaded by {world_size}, "
        f"because {reasons[0]}: resume on {checkpoint.world_size} slot{plural}."
    )


def convert(checkpoint: Checkpoint, distributed: DistributedContext) -> Path:
    """Writes a copy of a checkpoint that any number of ranks can load. Call it on all ranks.

    The copy has the checkpoint's layout. Folders with ZeRO's states are converted, and all other files are links to the
    checkpoint's. It is hidden beside it, `.batch-00000120.universal`. The store removes leftovers of a killed process.
    """
    copy = checkpoint.path.with_name(f".{checkpoint.name}.universal")
    on_rank_0(distributed, lambda: _write_copy(checkpoint.path, copy))
    must_be_seen(distributed, copy)
    return copy


@contextmanager
def loading_universal(engines: Sequence[Any]) -> Iterator[None]:
    """Makes `load_checkpoint` of the engines with ZeRO read a converted copy, for its body only.

    DeepSpeed has a setting for this, but it would apply to every later load as well.
    """
    divided = [engine for engine in engines if engine.zero_optimization()]
    for engine in divided:
        engine._config.load_universal_checkpoint = True
        engine._load_zero_checkpoint = _also_loading_the_rest(engine)
    try:
        yield
    finally:
        for engine in divided:
            engine._config.load_universal_checkpoint = False
            del engine._load_zero_checkpoint


def _hindrance(engine: Any) -> str | None:
    # Why an engine cannot load the checkpoint of another number of ranks; None if it can.
    if is_pipeline(engine):
        return "the stages of a pipeline and their replicas cannot be arranged anew"
    if engine.has_moe_layers:
        return "DeepSpeed keeps experts by rank"
    if engine.mp_world_size > 1:
        return "the model itself is divided among ranks"
    if engine.zero_nvme_offload_optimizer():
        return "DeepSpeed keeps states that are offloaded to NVMe by rank"
    if engine.zero_optimization_stage() == 3:
        return _hindrance_of_stage_3(engine)
    return None


def _hindrance_of_stage_3(engine: Any) -> str | None:
    # DeepSpeed's universal checkpoints of stage 3 hold the trained parameters and one set of hyperparameters.
    if len(engine.optimizer.optimizer.param_groups) > 1:
        return "the hyperparameters of several parameter groups are lost on the way at ZeRO stage 3"
    if any(not parameter.requires_grad for parameter in engine.module.parameters()):
        return "frozen parameters are lost on the way at ZeRO stage 3"
    if set(engine.module.state_dict(keep_vars=True)) - {name for name, _ in engine.module.named_parameters()}:
        return "buffers (of a BatchNorm, for example) are lost on the way at ZeRO stage 3"
    return None


def _also_loading_the_rest(engine: Any) -> Any:
    """Returns a complete `engine._load_zero_checkpoint` for a universal checkpoint.

    DeepSpeed's own loads the trained parameters, and leaves buffers and frozen parameters unchanged.
    """
    load = engine._load_zero_checkpoint

    def load_all(load_dir: str, tag: str, **options: Any) -> Any:
        trained = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
        for name, tensor in engine.module.state_dict().items():
            if name not in trained:
                path = Path(load_dir, tag, "zero", name, "fp32.pt")
                tensor.copy_(torch.load(path, map_location="cpu", weights_only=True)["param"])
        return load(load_dir, tag, **options)

    return load_all


def _write_copy(checkpoint: Path, copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    for parent, folders, names in os.walk(checkpoint):
        source, target = Path(parent), copy / Path(parent).relative_to(checkpoint)
        target.mkdir()
        if any(name.endswith(_DIVIDED) for name in names):
            _convert_engine(source, target)
        for name in [*names, *(folder for folder in folders if (source / folder).is_symlink())]:
            if not name.endswith(_DIVIDED) and not (target / name).exists():
                (target / name).symlink_to(source / name)
    for latest in copy.rglob("latest"):  # DeepSpeed's converter names the last one that it has converted
        latest.with_name("latest_universal").write_text(latest.read_text())


def _convert_engine(source: Path, target: Path) -> None:
    # In a process of its own, because it forks workers. A rank with its threads and its device must not.
    arguments = ["--input_folder", str(source), "--output_folder", str(target), "--inject_missing_state"]
    done = subprocess.run(
        [sys.executable, "-m", _CONVERTER, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        print(done.stdout, flush=True)
        last = (done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise InvalidTrialError(
            f"DeepSpeed could not convert {source} for another number of ranks ({last}; all of it is in rank 0's log): "
            "resume on as many slots as saved it."
        )
