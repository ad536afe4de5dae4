import json
from pathlib import Path

import pytest

from zerotune.trial_lib.messages.files import MetricsReader


def line(kind: str, batch: int, **rest: object) -> str:
    return json.dumps({"kind": kind, "batch": batch, "time": 1.0, **rest}) + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_line_is_read_once_and_when_it_is_whole(path: Path) -> None:
    reader = MetricsReader(path)
    assert reader.read() == []
    first, second = line("training", 1, epoch=0, metrics={"loss": 1.5}), line("checkpoint", 1, name="a", metric=None)
    path.write_text(first + second[:20])
    (record,) = reader.read()
    assert (record.kind, record.batch, record.epoch, record.metrics) == ("training", 1, 0, {"loss": 1.5})
    assert record.end == len(first)
    path.write_text(first + second)
    (record,) = reader.read()
    assert (record.kind, record.name, record.metric) == ("checkpoint", "a", None)
    assert reader.read() == []


def test_a_batch_that_is_told_again_is_passed_over_kind_by_kind(path: Path) -> None:
    path.write_text(
        "".join([line("training", 1), line("training", 2), line("validation", 2), line("note", 0, text="x")])
    )
    reader = MetricsReader(path)
    assert len(reader.read()) == 4
    with path.open("a") as file:
        file.write(
            "".join([line("training", 2), line("validation", 2), line("note", 0, text="x"), line("training", 3)])
        )
    assert [(record.kind, record.batch) for record in reader.read()] == [("note", 0), ("training", 3)]


@pytest.mark.parametrize("damaged", ["{", "[]", '{"batch": 1}', '{"kind": "training", "batch": "x"}', "\0\0"])
def test_a_damaged_line_costs_that_line(path: Path, damaged: str) -> None:
    path.write_text(damaged + "\n" + line("training", 1))
    assert [record.batch for record in MetricsReader(path).read()] == [1]


def test_what_is_no_number_is_left_out(path: Path) -> None:
    path.write_text(line("training", 1, metrics={"loss": 1, "name": "x", "parts": [1]}))
    assert MetricsReader(path).read()[0].metrics == {"loss": 1.0}
