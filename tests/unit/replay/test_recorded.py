"""A table's file: what is appended is read, whatever the end of the recording has left."""

import os
import stat
from pathlib import Path

import pytest

from benchmarks.replay.recorded import TableHead, TableRow, append_line, read_table
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import drop_torn_tail
from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome

HEAD = TableHead(
    name="two\u2028lines",
    entrypoint=["train.py"],
    base_config={},
    slots=1,
    device="cpu",
    memory_limit=None,
    profile=ModelProfile(
        num_params=1,
        trainable_num_params=1,
        activation_mem_per_gpu=1,
        gpu_mem=1,
        data_parallel_size=1,
        flops_per_sample=1.5,
    ),
)


def row(size: int) -> TableRow:
    return TableRow(
        candidate=Candidate(micro_batch_size=size, slots=1),
        repeat=0,
        outcome=Outcome.COMPLETED,
        metrics={"throughput": float(size)},
        step_times=[0.1],
        losses=[1.0],
        memory=Memory(peak=[1]),
        phases={},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    append_line(tmp_path / "table.jsonl", HEAD)
    append_line(tmp_path / "table.jsonl", row(1))
    return tmp_path / "table.jsonl"


def rows_of(path: Path) -> list[TableRow]:
    return [row for rows in read_table(path).rows.values() for row in rows]


def test_a_table_is_read_as_it_was_written(path: Path) -> None:
    table = read_table(path)
    assert (table.head, rows_of(path)) == (HEAD, [row(1)])


def test_a_recording_that_was_killed_in_a_line_goes_on_behind_the_last_whole_one(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'{"candidate": ')
    assert rows_of(path) == [row(1)]
    drop_torn_tail(path)
    append_line(path, row(2))
    assert rows_of(path) == [row(1), row(2)]


def test_a_table_has_the_permissions_of_any_file_of_the_users(path: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("content", [b"", b"{", b"{}\n", b"\xff\xfe\n"])
def test_what_is_no_table_is_named(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"table\.jsonl: this is no recorded table, or it is damaged"):
        read_table(path)


def test_a_table_that_is_missing_or_no_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_table(path)
