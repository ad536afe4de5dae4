"""The foreseen step of a model that a switch compiles."""

import math
from dataclasses import replace
from typing import Any

import pytest
from synthetic import EXACT, TWO, carried, moving, product, run_of

from benchmarks.foresee.public_gpus.row_cluster import cluster_of
from benchmarks.foresee.public_gpus.row_runs import run_of as run_of_program
from benchmarks.foresee.public_gpus.speed import program_for_speed, read_rows, runs_of
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun, Operation
from zerotune.trial_lib.plan.step_time import fused, planned_step

COMPILED = {"ds_config": {"program": {"model:compile": True}}}


def at(operation: Operation, module: int) -> Operation:
    return operation._replace(where=module)


def seconds(run: ForeseenRun) -> float:
    return planned_step(run, TWO, EXACT).seconds


@pytest.mark.parametrize("place", ["model:compile", "--torch_compile"])
def test_pointwise_operations_and_reductions_that_follow_each_other_are_one_pass(place: str) -> None:
    forward = [moving(1.0), moving(3.0, "norm"), product(1.0), moving(2.0, "copy"), moving(1.0, "reduction")]
    moments = (("forward", forward), ("backward", [product(2.0), moving(1.0)]), ("update", [moving(1.0), moving(1.0)]))
    plain = run_of(*moments, ds_config={"program": {place: False}})
    compiled = replace(plain, ds_config={"program": {place: True}})
    assert seconds(plain) == pytest.approx(1 + 3 + 1 + 2 + 1 + 3 + 2, rel=1e-3)
    # DeepSpeed's update is not compiled.
    assert seconds(compiled) == pytest.approx(3 + 1 + 2 + 3 + 2, rel=1e-3)
    # It may be no better than as written.
    assert planned_step(compiled, TWO, EXACT).high == planned_step(plain, TWO, EXACT).high
    assert planned_step(compiled, TWO, EXACT).low < planned_step(plain, TWO, EXACT).low


@pytest.mark.parametrize(("stage", "expected"), [(2, 2.0), (3, 4.0)])
def test_no_kernel_crosses_the_hooks_of_stage_3_around_a_module(stage: int, expected: float) -> None:
    forward = [at(moving(2.0), 1), at(moving(1.0), 1), at(moving(2.0), 2)]
    run = run_of(("forward", forward), stage=stage, modules=("", "one", "other"), **COMPILED)
    assert seconds(run) == pytest.approx(expected, rel=1e-3)


def test_no_kernel_crosses_a_transfer_or_the_host() -> None:
    backward = [moving(1.0), carried(1.0, "all_reduce"), moving(1.0), moving(1.0, on_host=1), moving(1.0)]
    run = run_of(("backward", backward), **COMPILED)
    assert fused(run).operations == run.operations


def test_moments_keep_their_operations() -> None:
    run = run_of(("forward", [moving(1.0), moving(1.0)]), ("between", [moving(1.0)]), ("backward", [product(1.0)]))
    assert [moment.operation for moment in fused(run).moments] == [0, 1, 2]
    assert len(fused(run).operations) == 3


@pytest.mark.long
def test_public_measurements_of_compiled_trainings_are_nearer_to_fused_kernels() -> None:
    """DeepCompile's paper (arXiv 2504.09983) has pairs at ZeRO-3, where compilation gained nothing.

    As written, all others are foreseen too slow. B200 is too fast with fused kernels, by more.
    """
    rows: list[dict[str, Any]] = [row for row in read_rows() if row.get("compiled")]
    compiled = runs_of(rows, only_formulas=False)
    errors, gains = [], []
    for row in rows:
        cluster, (run, by) = cluster_of(row), compiled.get(row["id"], (ForeseenRun(world=1), ""))
        # Products of 8 bits are not what the runs have.
        if cluster is None or by != "foreseen run" or "float8" in row["framework"]:
            continue
        written = run_of_program(program_for_speed(row))
        assert written is not None
        written = replace(written, accumulation=run.accumulation, versions=run.versions)
        steps = [planned_step(each, cluster) for each in (written, run)]
        if "DeepSpeed" in row["framework"]:
            gains.append(steps[0].seconds / steps[1].seconds)
        elif measured := row.get("tokens_per_s_per_gpu"):
            speeds = [math.log((each.tokens_per_s or 0.0) / row["gpus"] / measured) for each in steps]
            errors.append((*speeds, cluster.device.capability == 10.0))
    assert len(errors) == 11
    assert all(as_written < by_pass and as_written < 0 for as_written, by_pass, _ in errors)
    assert all(abs(by_pass) < -as_written for as_written, by_pass, is_b200 in errors if not is_b200)
    assert len(gains) == 5
    assert max(gains) < 1.05
