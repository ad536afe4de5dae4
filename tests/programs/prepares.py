"""Rank 0 prepares data by many functions, all ranks find and read them; then it trains, and writes over older files."""
# What it tests is each of the ways to name a file.
# ruff: noqa: PTH105, PTH119, PTH202, PTH207, PTH208

import glob
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from toy import parse_arguments, small_model, train

ROWS = 8


def by_child(path: Path) -> None:
    subprocess.run([sys.executable, "-c", f"open({str(path)!r}, 'wb').write(bytes({ROWS}))"], check=True)


def by_copy(path: Path) -> None:
    by_child(path.with_name("source"))
    subprocess.run(["cp", path.with_name("source"), path], check=True)
    path.with_name("source").unlink()


def by_database(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE IF NOT EXISTS rows (value INTEGER)")
        database.executemany("INSERT INTO rows VALUES (?)", [(row,) for row in range(ROWS)])


def by_arrow(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"rows": list(range(ROWS))}), path)


def by_rename(path: Path) -> None:
    torch.save(torch.arange(ROWS), path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def by_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    torch.save(torch.arange(ROWS), "target")
    path.symlink_to(Path("target").absolute())


def by_memory_map(path: Path) -> None:
    rows = np.memmap(path, dtype=np.uint8, mode="w+", shape=(ROWS,))
    rows[:] = 1
    rows.flush()


def by_numpy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(ROWS))


# Those that Python's own `open` has a part in, and those that write past it.
WAYS = {
    "torch": lambda path: torch.save(torch.arange(ROWS), path),
    "numpy": by_numpy,
    "numpy, raw": lambda path: np.arange(ROWS).tofile(path),
    "memory map": by_memory_map,
    "open": lambda path: path.write_bytes(bytes(ROWS)),
    "rename": by_rename,
    "link": by_link,
}
NATIVE_WAYS = {"database": by_database, "arrow": by_arrow, "child": by_child, "copy": by_copy}


def prepare(write: Callable[[Path], object], folder: Path) -> None:
    aside = folder.with_suffix(".new")
    aside.mkdir(parents=True)
    for shard in range(3):
        write(aside / f"shard{shard}.bin")
    aside.rename(folder)


def find(folder: Path) -> None:
    names = [f"shard{shard}.bin" for shard in range(3)]
    assert sorted(os.listdir(folder)) == names
    assert sorted(entry.name for entry in os.scandir(folder)) == names
    assert sorted(os.path.basename(path) for path in glob.glob(f"{folder}/shard?.bin")) == names
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [sorted(files) for _, _, files in os.walk(folder)] == [names]
    read = [path.read_bytes() for path in sorted(folder.glob("*"))]
    assert all(read)
    assert len(set(map(len, read))) == 1
    assert subprocess.run(["cat", folder / names[1]], capture_output=True, check=True).stdout == read[1]


def write_results(write: Callable[[Path], object], folder: Path) -> None:
    """Writes over what was there before, and beside it; only the latest of several checkpoints is kept."""
    write(folder / "old.bin")
    (folder / "best").mkdir()
    write(folder / "best" / "new.bin")
    torch.save({"step": 1}, folder / "last.pt")
    assert sorted(os.listdir(folder)) == ["best", "last.pt", "old.bin"]
    assert (folder / "old.bin").stat().st_size > 0
    shutil.rmtree(folder / "best")
    assert sorted(path.name for path in folder.glob("*")) == ["last.pt", "old.bin"]


def main() -> None:
    args = parse_arguments(native_results=1)
    deepspeed.init_distributed()
    data, is_first = Path("data"), dist.get_rank() == 0
    if is_first:
        for way, write in {**WAYS, **NATIVE_WAYS}.items():
            if not (data / way).is_dir():
                prepare(write, data / way)
                print("prepared by", way)
        for way in (*WAYS, *NATIVE_WAYS):
            assert os.listdir(f"results/{way}") == ["old.bin"]
            assert os.path.getsize(f"results/{way}/old.bin") == 0
    dist.barrier()
    for way in (*WAYS, *NATIVE_WAYS):
        find(data / way)

    model = small_model()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    train(engine, 1)
    for way, write in {**WAYS, **(NATIVE_WAYS if args.native_results else {})}.items() if is_first else ():
        write_results(write, Path("results") / way)
    train(engine, args.steps)


if __name__ == "__main__":
    main()
