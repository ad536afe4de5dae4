"""The programs that stand for public measurements."""

from typing import Any

import pytest

from benchmarks.foresee.public_gpus.model_of_row import RowProgram, lacks, program_of, read_rows

ROWS = read_rows()
WITH_PROGRAM = [row for row in ROWS if not lacks(row)]


def of(number: int) -> RowProgram:
    return program_of(next(row for row in ROWS if row["id"] == number))


def test_every_row_names_its_source() -> None:
    assert all(row["source"] for row in ROWS)
    assert len({row["id"] for row in ROWS}) == len(ROWS)


def test_most_rows_of_one_kind_of_parallelism_have_a_program() -> None:
    plain = [row for row in ROWS if row["tensor_parallel"] == row["pipeline_parallel"] == 1]
    assert len(WITH_PROGRAM) > 0.6 * len(plain)


@pytest.mark.parametrize("row", WITH_PROGRAM, ids=lambda row: row["id"])
def test_a_programs_model_has_the_parameters_of_its_row(row: dict[str, Any]) -> None:
    # litgpt unties the embeddings of Gemma, which its row counts once.
    if row.get("params") and row["id"] != 790:
        # A vision tower, experts or learned positions of a long sequence are not among the facts of a row.
        assert program_of(row).parameters == pytest.approx(row["params"], rel=0.12)


def test_fsdp_gathers_a_layer_at_a_time() -> None:
    zero = of(9).ds_config["zero_optimization"]
    assert (zero["stage"], zero["stage3_max_live_parameters"]) == (3, 2 * zero["reduce_bucket_size"])


def test_a_v100_has_no_fused_attention_unless_its_source_says_so() -> None:
    assert (of(924).attention, of(934).attention) == ("eager", "fused")


def test_old_models_compute_the_loss_in_the_precision_of_their_logits() -> None:
    assert (of(293).loss, of(885).loss, of(696).loss, of(9).loss) == ("half", "full", "compiled", "chunked")


def test_the_trainers_auto_is_a_multiple_of_the_width() -> None:
    program = of(293)
    zero = program.ds_config["zero_optimization"]
    assert (program.family, zero["reduce_bucket_size"]) == ("gpt2", 8192 * 8192)
    assert program.ds_config["fp16"] == {"enabled": True}


def test_ulysses_divides_the_sequence() -> None:
    assert (of(891).tokens, of(891).world) == (32768 // 4, 8)


def test_a_program_has_one_name_in_the_cache() -> None:
    assert of(776).key == of(776).key != of(777).key
