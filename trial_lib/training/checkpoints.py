"""The checkpoints of a training. Each is complete or absent, whatever kills the process and whenever the power fails.

A checkpoint is a folder, `batch-00000120`. It is written under a hidden name, and everything in it is written to the
disk. `manifest.json` with the size and the hash of each file comes last. Then the folder gets its name:

    .batch-00000120.partial    being written, or left behind by a process that was killed meanwhile
    batch-00000120             complete
    .batch-00000120.replaced   the complete one before it of the same batch, until the new one has its name
    .batch-00000120.pruned     no longer needed, being removed
    .batch-00000120.universal  a copy for another number of ranks, while these load it
    damaged-batch-00000120     was complete, and was found damaged later. It is kept for a person

A rank's own state, beside the engines', is in a file `rank0.pt` that is read without pickle.
"""

import contextlib
import dataclasses
import functools
import hashlib
import heapq
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from zerotune.trial_lib.messages.files import OWNERS_FOLDER, sync_folder, write_whole
from zerotune.trial_lib.training.distributed import DistributedContext, InvalidTrialError, must_be_seen, on_rank_0
from zerotune.trial_lib.training.model_parallel import is_pipeline

# The files of a checkpoint: their list, writing them to the disk, and whether they are still intact.

FileRecord = dict[str, Any]
"""The manifest's record of a file: `bytes`, and `sha256` in hexadecimal digits."""

CHUNK_BYTES = 1 << 20


def files_below(folder: Path) -> list[str]:
    # Relative to the folder. Symbolic links to folders are not followed.
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())


def dealt(sizes: dict[str, int], ranks: int) -> list[list[str]]:
    """Deals files to the ranks, with about equal bytes and alike on every rank."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]  # bytes, files, rank
    for size, name in sorted(((size, name) for name, size in sizes.items()), key=lambda file: (-file[0], file[1])):
        held, files, rank = heapq.heappop(loads)
        shares[rank].append(name)
        heapq.heappush(loads, (held + size, files + 1, rank))
    return shares


def seal(paths: list[Path]) -> list[FileRecord]:
    # One waits for the disk and the other for the processor, so together they take half the time.
    with ThreadPoolExecutor(1) as syncing:
        synced = syncing.map(_sync, paths)
        records = [_record(path) for path in paths]
        list(synced)  # raises what a sync has raised
    return records


def problem_of_size(path: Path, name: str, record: FileRecord) -> str | None:
    """How a file's size differs from its record. The file is not read."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if size == record["bytes"] else f"{name} has {size} bytes, not {record['bytes']}"


def problem_of_content(path: Path, name: str, record: FileRecord) -> str | None:
    """How a file's content differs from its record."""
    try:
        with path.open("rb") as file:
            digest = _digest(file)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if digest == record["sha256"] else f"{name} has the right size and another content"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": _digest(file)}


def _digest(file: BinaryIO) -> str:
    if sys.version_info >= (3, 11):
        return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


# The objects that a checkpoint can hold for a rank: those that are read back without pickle.


def unreadable_part(value: Any, where: str = "") -> str | None:
    """The innermost part of a state that `weights_only` cannot read back, such as `callbacks.ema is a Path`."""
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if not _reads_back(key):
                return f"a key of {where or 'it'} is {_kind(key)}"
            found = unreadable_part(inner, f"{where}.{key}" if where else str(key))
            if found is not None:
                return found
        if type(value) in (dict, list, tuple):
            return None
    return None if _reads_back(value) else f"{where or 'it'} is {_kind(value)}"


def _reads_back(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - a class may refuse to be pickled in words of its own
        return False
    return True


def _kind(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"batch-(\d{8,})")
_HIDDEN = re.compile(r"\.(batch-\d{8,})\.(partial|replaced|pruned|universal)")


@dataclass(frozen=True)
class Checkpoint:
    """One that is complete."""

    path: Path  # its folder
    batch: int  # the optimizer steps done when it was saved
    world_size: int  # the number of ranks that saved it
    metric: float | None  # the validation metric at this batch; None if it was not measured, or is not finite
    state: dict[str, Any]  # the state of the training loop, JSON

    @property
    def name(self) -> str:
        return self.path.name


class CheckpointStore:
    """The checkpoints of one training, in a folder that all ranks share. It keeps the best and the last two.

    The last but one is needed if the last turns out to be damaged, because the best may be old.
    """

    def __init__(self, root: Path, distributed: DistributedContext, smaller_is_better: bool) -> None:
        self.root = root.absolute()
        self._distributed = distributed
        self._smaller_is_better = smaller_is_better

    def save(
        self, batch: int, metric: float | None, state: dict[str, Any], write: Callable[[Path], None]
    ) -> Checkpoint:
        with self.saving(batch, metric, state) as (checkpoint, folder):
            write(folder)
        return checkpoint

    @contextlib.contextmanager
    def saving(self, batch: int, metric: float | None, state: dict[str, Any]) -> Iterator[tuple[Checkpoint, Path]]:
        """Saves the files that its body writes, then removes checkpoints that are no longer needed. All ranks enter it.

        It yields the future checkpoint and the folder to write it to, which all ranks share. A checkpoint of the same
        batch is replaced, because the new one may have a metric that the old one lacks. After any error there is no
        such checkpoint, and one of the same batch is unchanged.

        Raises:
            InvalidTrialError: the state is not JSON, or a file has the manifest's name; on all ranks.
            OSError: the disk is full or fails, or a rank does not see the folder; on all ranks.
            Exception: the body's own error, at once and only on the rank that failed. The others may be waiting for
                that rank there, and fail when it ends.
        """
        name = _name(batch)
        partial = self.root / f".{name}.partial"
        metric = metric if metric is not None and math.isfinite(metric) else None
        checkpoint = Checkpoint(self.root / name, batch, self._distributed.size, metric, state)
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise InvalidTrialError(
                f"The state of checkpoint {name} cannot be written as JSON ({error}): keep what is no number, string, "
                "list or dict of these in the state_dict of a callback."
            ) from error
        on_rank_0(self._distributed, lambda: self._begin(partial))
        must_be_seen(self._distributed, partial)
        yield checkpoint, partial
        self._distributed.barrier()
        sizes = on_rank_0(
            self._distributed, lambda: {name: (partial / name).stat().st_size for name in files_below(partial)}
        )
        if MANIFEST in sizes:
            raise InvalidTrialError(
                f"The trial has saved a file {MANIFEST} at the top of its checkpoint, where the list of the "
                "checkpoint's files belongs: give it another name, or a folder of its own."
            )
        records = self._sealed(partial, sizes)
        on_rank_0(self._distributed, lambda: self._complete(partial, checkpoint, records))
        if self._distributed.rank == 0:
            self._prune()

    def judge(self, batch: int, metric: float) -> None:
        """Adds a metric that was measured later to this batch's checkpoint, if there is one. Call it on one rank."""
        with contextlib.suppress(_DamagedError):
            checkpoint, records = _read_manifest(self.root / _name(batch))
            if math.isfinite(metric):
                _write_manifest(checkpoint.path, dataclasses.replace(checkpoint, metric=metric), records)

    def newest_intact(self, note: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint with intact files. Call it on all ranks, which share the reading.

        A damaged one gets the name `damaged-...`, because the training will save its batch again under the old name,
        and until then it must not count as the latest or the best. It is kept, except for a later damaged one of the
        same batch: it may be all the work since the checkpoint before, and a person may still save it. `note` is called
        on rank 0 with each and its damage.
        """
        names = on_rank_0(self._distributed, self._tidied_names)
        while names:
            name = names.pop()
            must_be_seen(self._distributed, self.root / name)
            verified = self._verified(self.root / name)
            if isinstance(verified, Checkpoint):
                return verified
            on_rank_0(self._distributed, functools.partial(self._set_aside, name))
            if self._distributed.rank == 0:
                instead = "the one before is used" if names else "there is none before it, so the training begins anew"
                note(
                    f"checkpoint {name} is damaged ({verified}); {instead}. It was renamed to damaged-{name}: look "
                    "at it, or delete it"
                )
        return None

    def complete(self) -> list[Checkpoint]:
        """Oldest first, as this process sees them. Their files are not read."""
        found = []
        for name in self._names():
            with contextlib.suppress(_DamagedError):
                found.append(_read_manifest(self.root / name)[0])
        return found

    def best(self) -> Checkpoint | None:
        """The oldest of equals; None if no checkpoint has a metric."""
        return self._best_of(self.complete())

    def _best_of(self, checkpoints: list[Checkpoint]) -> Checkpoint | None:
        sign = 1.0 if self._smaller_is_better else -1.0
        measured = [(sign * found.metric, found.batch, found) for found in checkpoints if found.metric is not None]
        return min(measured)[2] if measured else None

    # -- steps of a save, on rank 0 unless they say otherwise ------------------------------------------------------

    def _begin(self, partial: Path) -> None:
        missing = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        self.root.mkdir(mode=OWNERS_FOLDER, parents=True, exist_ok=True)
        for folder in missing:
            sync_folder(folder.parent)
        self._tidy()
        partial.mkdir(mode=OWNERS_FOLDER)

    def _sealed(self, folder: Path, sizes: dict[str, int]) -> dict[str, FileRecord]:
        # Writes the files to the disk and returns their records. Each rank does its share.
        rank = self._distributed.rank
        records: dict[str, FileRecord] = {}
        problem = None
        try:
            share = dealt(sizes, self._distributed.size)[rank]
            records = dict(zip(share, seal([folder / name for name in share]), strict=True))
        except OSError as error:
            problem = f"rank {rank}: {error}"
        shares = self._distributed.allgather((records, problem))
        for _, problem in shares:
            if problem is not None:
                raise OSError(f"The checkpoint in {folder} could not be brought to the disk ({problem}).")
        return {name: record for share, _ in shares for name, record in share.items()}

    def _complete(self, partial: Path, checkpoint: Checkpoint, records: dict[str, FileRecord]) -> None:
        for parent, names, _ in os.walk(partial):
            for name in names:
                sync_folder(Path(parent, name))
        # This also writes the names in `partial` to the disk.
        _write_manifest(partial, checkpoint, records)
        replaced = self.root / f".{checkpoint.name}.replaced"
        if checkpoint.path.exists():
            checkpoint.path.rename(replaced)
        partial.rename(checkpoint.path)
        sync_folder(self.root)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self) -> None:
        checkpoints = self.complete()
        best = self._best_of(checkpoints)
        surplus = [found for found in checkpoints[:-2] if found is not best]
        hidden = [found.path.rename(self.root / f".{found.name}.pruned") for found in surplus]
        if hidden:
            # The new names are on the disk before a file is removed, so no half of a checkpoint returns
            # under the old name.
            sync_folder(self.root)
        for folder in hidden:
            shutil.rmtree(folder, ignore_errors=True)

    def _tidy(self) -> None:
        # Removes leftovers of killed processes. A checkpoint that was being replaced gets its name back.
        for folder in list(self.root.iterdir()) if self.root.exists() else ():
            leftover = _HIDDEN.fullmatch(folder.name)
            if leftover is None:
                continue
            name, kind = leftover.groups()
            if kind == "replaced" and not (self.root / name).exists():
                folder.rename(self.root / name)
            else:
                shutil.rmtree(folder, ignore_errors=True)

    # -- steps of a search ---------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        folders = self.root.iterdir() if self.root.exists() else ()
        names = (folder.name for folder in folders if _NAME.fullmatch(folder.name))
        return sorted(names, key=lambda name: int(name.removeprefix("batch-")))

    def _tidied_names(self) -> list[str]:
        self._tidy()
        return self._names()

    def _verified(self, folder: Path) -> Checkpoint | str:
        # A checkpoint, or its damage. Each rank reads its share.

        def read() -> tuple[Checkpoint, dict[str, FileRecord]] | str:
            try:
                return _read_manifest(folder)
            except _DamagedError as error:
                return str(error)

        manifest = on_rank_0(self._distributed, read)
        if isinstance(manifest, str):
            return manifest
        checkpoint, records = manifest
        sizes = {name: record["bytes"] for name, record in records.items()}
        share = dealt(sizes, self._distributed.size)[self._distributed.rank]
        for problem_of in (problem_of_size, problem_of_content):  # a look at all sizes first: no file is read for it
            problems = (problem_of(folder / name, name, records[name]) for name in share)
            own = next((problem for problem in problems if problem is not None), None)
            found = [problem for problem in self._distributed.allgather(own) if problem is not None]
            if found:
                return str(found[0])
        return checkpoint

    def _set_aside(self, name: str) -> None:
        damaged = self.root / f"damaged-{name}"
        shutil.rmtree(damaged, ignore_errors=True)
        (self.root / name).rename(damaged)
        sync_folder(self.root)


def write_end(path: Path, store: CheckpointStore | None, batches: int | None, metrics: dict[str, float]) -> None:
    """Records the end of a training that has reached its length, with its latest and its best checkpoint."""
    complete = [] if store is None else store.complete()
    best = None if store is None else store.best()
    end = {
        "batches": batches,
        "latest_checkpoint": complete[-1].name if complete else None,
        "best_checkpoint": best and best.name,
        "best_metric": best and best.metric,
        "metrics": metrics,
    }
    write_whole(path, json.dumps(end, indent=2))


def save_rank_state(folder: Path, rank: int, state: dict[str, Any]) -> None:
    """Writes a rank's own state: tensors, numbers, strings, and lists, tuples and dicts of them."""
    path = _rank_file(folder, rank)
    try:
        torch.save(state, path)
        # Mapped, so that only the structure of the objects is read, and no tensor.
        torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        offender = unreadable_part(state)
        if offender is None:
            raise  # nothing is wrong with the state: the disk is full, say
        raise InvalidTrialError(
            f"The state of rank {rank} cannot be saved: {offender}. A checkpoint is read without pickle and holds "
            "tensors, numbers, strings, lists, dicts and tuples: return such from the state_dict."
        ) from error


def load_rank_state(folder: Path, rank: int) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(_rank_file(folder, rank), map_location="cpu", weights_only=True)
    return state


class _DamagedError(Exception):
    """The damage of a checkpoint's manifest."""


def _name(batch: int) -> str:
    return f"batch-{batch:08d}"


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


def _write_manifest(folder: Path, checkpoint: Checkpoint, records: dict[str, FileRecord]) -> None:
    manifest = {
        "format": FORMAT,
        "batch": checkpoint.batch,
        "world_size": checkpoint.world_size,
        "metric": checkpoint.metric,
        "state": checkpoint.state,
        "files": dict(sorted(records.items())),
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1))


def _read_manifest(folder: Path) -> tuple[Checkpoint, dict[str, FileRecord]]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise _DamagedError(f"{MANIFEST} has the format {manifest['format']}, and this program reads {FORMAT}")
        batch, world_size, metric = manifest["batch"], manifest["world_size"], manifest["metric"]
        state, records = manifest["state"], manifest["files"]
    except FileNotFoundError:
        raise _DamagedError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamagedError(f"{MANIFEST} cannot be read: {error!r}") from error
    if folder.name != _name(batch):
        raise _DamagedError(f"{MANIFEST} is that of {_name(batch)}")
    return Checkpoint(folder, batch, world_size, metric, state), records


# A checkpoint for another number of ranks: the states that ZeRO divided are joined and divided again.
#
# DeepSpeed loads ZeRO's states only as they were divided. Its universal checkpoints hold each parameter and its
# optimizer states whole. `deepspeed.checkpoint.ds_to_universal` makes one of a checkpoint, and an engine with a setting
# reads it. Without ZeRO (stage 0) every rank has everything, and nothing is converted.

_CONVERTER = "deepspeed.checkpoint.ds_to_universal"
_DIVIDED = "_optim_states.pt"
"""The ending of the files with a rank's part of ZeRO's optimizer states."""


@contextmanager
def loadable(checkpoint: Checkpoint, engines: Sequence[Any], distributed: DistributedContext) -> Iterator[Path]:
    """Yields the folder from which these engines load a checkpoint. Call it on all ranks.

    It is the checkpoint's own if as many ranks saved it. If not, it is a converted copy, which is removed afterwards.
    Errors are raised on all ranks.
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
    # DeepSpeed's own loads the trained parameters, and leaves buffers and frozen parameters unchanged.
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


def main(arguments: Sequence[str]) -> None:
    """Entry: prints a line for each damaged checkpoint in a folder, and then the name of the newest intact one, or an
    empty line.
    """
    store = CheckpointStore(Path(arguments[0]), DistributedContext(), smaller_is_better=True)
    newest = store.newest_intact(print)
    print("" if newest is None else newest.name)
