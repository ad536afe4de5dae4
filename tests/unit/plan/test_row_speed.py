"""The comparison with public measurements: its groups, its order, and the stand-in for a foreseen run."""

from typing import Any

import pytest

from benchmarks.foresee.public_gpus.formula_run import formula_run
from benchmarks.foresee.public_gpus.model_of_row import read_rows
from benchmarks.foresee.public_gpus.row_cluster import cluster_of
from benchmarks.foresee.public_gpus.speed import compared, left_out, rank_correlation, runs_of, timed
from zerotune.trial_lib.plan.devices import Efficiencies
from zerotune.trial_lib.plan.step_time import model_flops

ROWS = {row["id"]: row for row in read_rows()}
# MPT 760M on 8 A100 with 2,048 tokens, without and with a repeated forward pass at another length.
PLAIN, LONG = 118, 113


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 2, 2 * (1 + 1e-9), 4], 0.949),
        ([1, 2, 3], [5, 5, 5], None),
    ],
)
def test_ranks_are_correlated_with_ties(one: list[float], other: list[float], expected: float | None) -> None:
    found = rank_correlation(one, other)
    assert found == (expected if expected is None else pytest.approx(expected, abs=1e-3))


@pytest.mark.parametrize("row_id", [PLAIN, LONG])
def test_formulas_count_the_work_of_a_model(row_id: int) -> None:
    """6 FLOPs for each parameter and token, and attention: what the source of these rows counts too."""
    row = ROWS[row_id]
    tokens = row["micro_batch"] * row["grad_accum"] * row["seq_len"]
    expected = tokens * (6 * row["params"] + 12 * row["layers"] * row["hidden"] * row["seq_len"])
    # Positions are parameters too, but not multiplied; a backward pass of attention has 2.5 times the work.
    assert model_flops(formula_run(row)) == pytest.approx(expected, rel=0.1)


def test_states_are_reduced_once_and_gathered_twice() -> None:
    run = formula_run({**ROWS[PLAIN], "grad_accum": 1})
    moved = {kind: sum(each.moved for each in run.operations if each.kind == kind) for kind in (11, 12)}
    # Two bytes forward and backward; four bytes back, as PyTorch's own sharding reduces in 32 bits.
    assert moved[11] / moved[12] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(
    ("words", "per_host", "rate"),
    [
        ("8 x 200 Gbit/s HDR InfiniBand per node", 8, 25e9),
        ("400 Gbit/s RDMA per GPU", 8, 50e9),
        ("1 x 100 Gbit/s InfiniBand per 16-GPU node", 16, 0.78125e9),
        (None, 8, 25e9),
    ],
)
def test_a_stated_network_counts(words: str | None, per_host: int, rate: float) -> None:
    row: dict[str, Any] = {"gpu_kind": "A100-80GB", "gpus": 64, "gpus_per_node": per_host, "interconnect": words}
    cluster = cluster_of(row)
    assert cluster is not None
    assert (cluster.device.network, cluster.ranks) == (rate, 64)


def test_rows_say_why_they_are_left_out() -> None:
    assert left_out(ROWS[PLAIN]) == ""
    assert left_out({**ROWS[PLAIN], "pipeline_parallel": 4}) == "pipeline parallelism"
    assert left_out({**ROWS[PLAIN], "gpu_kind": "TPU v4"}) == "unknown device: TPU v4"
    assert left_out({**ROWS[PLAIN], "vocab": None}) == "no vocab"


def test_a_group_has_its_order_and_its_first_choice() -> None:
    members = [row for row in ROWS.values() if row["model"] == "GPT 175B" and row["gpus"] == 128]
    found = compared(members, Efficiencies(), only_formulas=True)
    (group, *_) = found["by_configuration_alone"]["each"]
    assert group["rank_correlation"] > 0.9
    assert group["lost_by_first_choice"] == 0.0
    assert found["operations_by"] == {"formulas": len(found["rows"])}


def test_groups_come_from_foreseen_runs_as_a_whole_or_not_at_all() -> None:
    one = [row for row in ROWS.values() if row["model"] == "GPT-2 style 25B" and row["id"] in (269, 270)]
    assert {by for _, by in runs_of(one, only_formulas=False).values()} == {"foreseen run"}
    unknown = {**one[0], "id": -1, "hidden": 7232}
    assert {by for _, by in runs_of([*one, unknown], only_formulas=False).values()} == {"formulas"}


def test_a_group_of_ranks_has_one_adapter_of_jean_zay() -> None:
    """By the source's own measurement, so the shards of a model share a host's four."""
    rates = [
        (found.device.network * found.per_host / tp, tp)
        for tp in (1, 2, 4)
        if (found := cluster_of({**ROWS[268], "tensor_parallel": tp}))
    ]
    assert [rate for rate, _ in rates] == [12.5e9] * 3


def test_a_row_is_compared_in_its_own_metric() -> None:
    row = ROWS[PLAIN]
    found = timed(row, formula_run(row), "formulas", Efficiencies())
    assert found.metric == "tokens_per_s"
    assert found.measured == row["tokens_per_s_per_gpu"]
    assert found.foreseen == pytest.approx((found.step.tokens_per_s or 0) / row["gpus"])


@pytest.mark.parametrize(
    ("row_id", "changes", "why"),
    [
        # Megatron-DeepSpeed's 7B with Ulysses, issue 5305, as stated.
        (891, {}, "more FLOP/s than its device has"),
        (891, {"tokens_per_s_per_gpu": 4000}, ""),
        # An MFU without a word of its FLOPs, at 32,768 positions and at 1,024.
        (629, {}, "it may count all of attention's FLOPs or half of them"),
        (629, {"tflops_def": "attention in full"}, ""),
        (629, {"seq_len": 1024}, ""),
    ],
)
def test_a_figure_that_cannot_be_or_that_may_mean_two_speeds_is_not_compared(
    row_id: int, changes: dict[str, Any], why: str
) -> None:
    assert left_out({**ROWS[row_id], **changes}) == why


def test_a_row_has_the_attention_of_its_own_torch_and_is_compiled_if_it_was() -> None:
    # MPT, whose attention is older than flash-attn 2, and the same with torchtune's compiler.
    found = runs_of([ROWS[PLAIN], ROWS[788]], only_formulas=False)
    assert [found[number][0].versions["torch"] for number in (PLAIN, 788)] == ["2.0", "2.4"]
    written = runs_of([{**ROWS[788], "compiled": None}], only_formulas=True)[788][0]
    compiled = runs_of([ROWS[788]], only_formulas=True)[788][0]
    assert len(compiled.operations) < len(written.operations)
    assert compiled.stage == written.stage
