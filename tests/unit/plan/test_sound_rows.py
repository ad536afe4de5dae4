"""Rows of a file that nobody has seen: other words, missing fields, and lines that are no rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.foresee.public_gpus import memory, row_bytes, speed
from benchmarks.foresee.public_gpus.foreseen_rows import store_of
from benchmarks.foresee.public_gpus.judge import main, results_of, text_of
from benchmarks.foresee.public_gpus.model_of_row import ROWS, lacks, program_of, read_rows
from benchmarks.foresee.public_gpus.row_device import capacity, device_of
from benchmarks.foresee.public_gpus.sound_rows import rows_of, sound
from benchmarks.foresee.public_gpus.speed import left_out
from zerotune.trial_lib.messages.errors import InputError

PLAIN = {
    "id": 1,
    "framework": "HF Trainer + DeepSpeed ZeRO-2",
    "model": "Llama 1.1B",
    "layers": 22,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 4,
    "ffn": 5632,
    "vocab": 32000,
    "seq_len": 2048,
    "micro_batch": 4,
    "gpus": 4,
    "gpu_kind": "A100-40GB",
    "samples_per_s": 20.0,
}


def read(*rows: dict[str, Any] | str, tmp_path: Path) -> list[dict[str, Any]]:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in rows))
    return read_rows(file)


def test_committed_rows_stay_as_they_are() -> None:
    text = ROWS.read_text()
    assert rows_of(text) == [json.loads(line) for line in text.splitlines()]


def test_a_row_that_leaves_out_much_has_a_program() -> None:
    row = sound(PLAIN)
    assert not lacks(row)
    assert not left_out(row)
    assert (row["zero_stage"], row["gpu_memory_gib"], row["use_for"]) == (2, 40, ["throughput", "fit"])
    assert program_of(row).ds_config["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("name", "written", "expected"),
    [
        ("seq_len", "4k", 4096),
        ("params", "1.1B", 1.1e9),
        ("vocab", "32,000", 32000),
        ("micro_batch", 4.0, 4),
        ("grad_accum", "unknown", None),
        ("zero_stage", "ZeRO-3", 3),
        ("zero_stage", "3 (hpZ 16)", 3),
        ("offload_optimizer", True, "cpu"),
        ("offload_param", {"device": "cpu"}, "cpu"),
        ("offload_param", None, "none"),
        ("activation_checkpointing", "yes", True),
        ("activation_checkpointing", "selective (op)", "selective (op)"),
        ("outcome", "CUDA OOM", "out_of_memory"),
        ("use_for", "peak_memory, fit", ["peak_memory", "fit"]),
    ],
)
def test_fields_may_be_written_otherwise(name: str, written: Any, expected: Any) -> None:
    row = sound({**PLAIN, name: written})
    assert "unusable" not in row
    assert row.get(name) == expected


@pytest.mark.parametrize(
    ("framework", "gpus", "stage"),
    [
        ("PyTorch FSDP", 8, 3),
        ("HF DDP", 8, 0),
        ("plain PyTorch", 1, 0),
        ("DeepSpeed", 8, None),
        ("DeepSpeed ZeRO1", 8, 1),
    ],
)
def test_a_framework_may_name_the_stage(framework: str, gpus: int, stage: int | None) -> None:
    row = sound({**PLAIN, "framework": framework, "gpus": gpus})
    assert row.get("zero_stage") == stage
    assert lacks(row) == ("" if stage is not None else "no zero_stage")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"micro_batch": "as large as fits"}, "micro_batch is 'as large as fits'"),
        ({"layers": -2}, "layers is -2"),
        ({"layers": 2.5}, "layers is 2.5"),
        ({"gpus": True}, "gpus is True"),
        ({"zero_stage": 7}, "zero_stage is 7"),
        ({"ds": "default"}, "ds is 'default'"),
        ({"heads": 30, "kv_heads": 30}, "hidden 2048 is no multiple of heads 30"),
        ({"gpus": 6, "tensor_parallel": 4}, "gpus 6 is no multiple of tensor_parallel 4"),
        ({"vocab": None}, "no vocab"),
        ({"params": 46.7e9}, "its shapes have 1.1 billion parameters, where it says 46.7"),
        ({"model": "bert-large", "framework": "DeepSpeed ZeRO-2"}, "an encoder"),
        ({"optimizer": "SGD"}, "states of the optimizer SGD"),
        ({"offload_optimizer": "nvme"}, "offload to nvme"),
    ],
)
def test_a_row_without_a_program_says_why(changes: dict[str, Any], why: str) -> None:
    assert lacks(sound({**PLAIN, **changes})) == why


def test_adapters_alone_are_another_training(tmp_path: Path) -> None:
    (row,) = read({**PLAIN, "note": "QLoRA, rank 16"}, tmp_path=tmp_path)
    assert lacks(row) == left_out(row) == "adapters alone are trained"


def test_a_line_that_is_no_row_stops_no_other(tmp_path: Path) -> None:
    rows = read(PLAIN, "no row", "[1]", {}, {**PLAIN, "micro_batch": 8}, tmp_path=tmp_path)
    assert [row["id"] for row in rows] == [1, "line 2", "line 3", "line 4", "1 (line 5)"]
    assert [bool(lacks(row)) for row in rows] == [False, True, True, True, False]
    assert lacks(rows[1]).startswith("no JSON")


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for name in ("empty.jsonl", "missing.jsonl"):
        with pytest.raises(InputError, match="a row in each line"):
            read_rows(tmp_path / name)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("RTX 4090 24GB", "rtx4090-24gb"),
        ("L40S", "l40s-48gb"),
        ("L40", None),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
        ("A100-SXM4-80GB", "a100-80gb"),
        ("H100 SXM (NVLink)", "h100-80gb"),
        ("H100 NVL", "h100-94gb-nvl"),
        ("GH200", None),
        ("V100-PCIe-32GB", "v100-32gb"),
        ("MI300X 192GB", "mi300x-192gb"),
        ("", None),
    ],
)
def test_words_name_a_device(words: str, name: str | None) -> None:
    found = device_of({"gpu_kind": words})
    assert (found.name if found else None) == name


def test_a_device_of_unknown_size_decides_no_fit() -> None:
    assert capacity({"gpu_kind": "a kind of tomorrow"}) == float("inf")


def test_what_is_found_of_other_rows_is_in_the_cache(tmp_path: Path) -> None:
    read(PLAIN, tmp_path=tmp_path)
    file = tmp_path / "rows.jsonl"
    first = store_of(file, row_bytes.STORE)
    read({**PLAIN, "micro_batch": 8}, tmp_path=tmp_path)
    assert first != store_of(file, row_bytes.STORE) != row_bytes.STORE == store_of(ROWS, row_bytes.STORE)


def test_a_whole_file_is_judged_row_by_row(tmp_path: Path) -> None:
    """Without runs: the speed comes from formulas, and memory says that nothing was run."""
    slower = {**PLAIN, "id": 2, "micro_batch": 1, "samples_per_s": 10.0}
    strange = {**PLAIN, "id": 3, "gpu_kind": "TPU v4"}
    rows = read(PLAIN, slower, strange, "no row", tmp_path=tmp_path)
    results = results_of(rows, tmp_path / "rows.jsonl")
    assert results["speed"]["operations_by"] == {"formulas": 2}
    text = text_of(rows, results)
    assert "not run: 1, 2, 3" in text
    assert "unknown device: TPU v4: 3" in text
    assert "no JSON: Expecting value: line 1 column 1 (char 0): line 4" in text
    assert "lost by the first choice, median (1 groups); bar: at most 0.05" in text


def test_arithmetic_that_fails_for_a_row_leaves_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last resort, for what no check has foreseen."""
    rows = read(PLAIN, {**PLAIN, "id": 2, "source": "another"}, tmp_path=tmp_path)
    whole = speed.formula_run

    def fails_for_one(row: dict[str, Any]) -> Any:
        if row["id"] == 2:
            raise ZeroDivisionError("float division")
        return whole(row)

    monkeypatch.setattr(speed, "formula_run", fails_for_one)
    monkeypatch.setattr(memory, "compare", lambda row, store, code: whole({}))
    results = results_of(rows, tmp_path / "rows.jsonl")
    assert [each["id"] for each in results["speed"]["rows"]] == [1]
    assert results["speed"]["failed"] == {2: "KeyError: 2"}
    assert [each["left_out"] for each in results["memory"]["rows"]] == ["KeyError: 'framework'"] * 2


def test_settings_of_deepspeed_are_numbers_or_left_out() -> None:
    stated = {"reduce_bucket_size": "5e8", "overlap_comm": True, "offload_param": {"device": "cpu"}, "a": None}
    program = program_of(sound({**PLAIN, "ds": stated}))
    zero = program.ds_config["zero_optimization"]
    assert zero == {"stage": 2, "reduce_bucket_size": 500_000_000, "overlap_comm": True}


def test_a_call_without_time_begins_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read(PLAIN, tmp_path=tmp_path)
    for module in ("judge", "foreseen_rows", "row_bytes"):
        monkeypatch.setattr(f"benchmarks.foresee.public_gpus.{module}.code", lambda: "of a test")
    main([str(tmp_path / "rows.jsonl"), "--to", str(tmp_path / "out"), "--minutes", "0"])
    assert "not run: 1" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "memory.json").read_text())["summary"]["left_out"] == {"not run": 1}


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "missing.jsonl"), "--to", str(tmp_path)])
    assert ended.value.code == 2
    assert "missing.jsonl: No such file or directory. Give a file" in capsys.readouterr().err
