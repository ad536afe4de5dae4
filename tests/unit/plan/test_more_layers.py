"""The step of a model with many layers, from one with few."""

from collections import Counter
from pathlib import Path

import pytest
from synthetic import run_of

from benchmarks.foresee.public_gpus import row_runs
from benchmarks.foresee.public_gpus.formula_run import formula_run
from benchmarks.foresee.public_gpus.model_of_row import RowProgram, read_rows
from benchmarks.foresee.public_gpus.more_layers import period_of, with_layers
from benchmarks.foresee.public_gpus.row_runs import few_layers
from benchmarks.foresee.public_gpus.row_runs import run_of as stored_run
from benchmarks.foresee.public_gpus.speed import program_for_speed
from zerotune.trial_lib.messages.foreseen_run import OPERATIONS, ForeseenRun, Operation
from zerotune.trial_lib.plan.step_time import kind_of, model_flops

OF_LAYER, OUTSIDE = 100, 50
ROWS = {row["id"]: row for row in read_rows()}


def operation(kind: str, size: float, ranks: int = 1) -> Operation:
    return Operation(OPERATIONS.index(kind), 0, size if kind == "matmul" else 0.0, size, ranks)


def model(layers: int) -> ForeseenRun:
    """A model whose backward pass reduces every 240 parameters, in the middle of a layer."""
    one = [operation("all_gather", 9, 2), operation("norm", 1), operation("matmul", 2), operation("matmul", 3)]
    forward = [operation("embedding", 5), *(one * layers), operation("matmul", 7)]
    backward, waiting = [operation("matmul", 7)], OUTSIDE
    for _ in range(layers):
        for part in (operation("matmul", 3), operation("matmul", 2), operation("norm", 1)):
            backward.append(part)
            waiting += OF_LAYER // 3
            if waiting >= 240:
                backward += [operation("copy", waiting), operation("reduce_scatter", waiting, 2)]
                waiting = 0
    backward += [operation("reduce_scatter", waiting, 2)] if waiting else []
    parameters = OUTSIDE + layers * OF_LAYER
    update = [operation("update", parameters)]
    stretches = ("forward", forward), ("backward", backward), ("update", update)
    return run_of(*stretches, parameters=parameters, trainable=parameters, stage=3)


def sums(run: ForeseenRun) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in run.operations:
        found[kind_of(each)] += round(each.moved)
    return found


@pytest.mark.parametrize("layers", [6, 7, 12, 40])
def test_more_layers_have_the_work_of_a_model_that_has_them(layers: int) -> None:
    found, whole = with_layers(model(6), 6, layers, OF_LAYER), model(layers)
    for kind in ("matmul", "norm", "all_gather", "embedding", "update"):
        assert sums(found)[kind] == sums(whole)[kind]
    assert sums(found)["reduce_scatter"] == pytest.approx(sums(whole)["reduce_scatter"], rel=0.02)
    assert (found.parameters, found.trainable) == (whole.parameters, whole.trainable)
    assert [moment.name for moment in found.moments] == [moment.name for moment in whole.moments]


def test_a_period_of_two_layers_comes_in_pairs() -> None:
    pair = [operation("norm", 1), operation("matmul", 2), operation("norm", 1), operation("matmul", 4)]
    run = run_of(("forward", pair * 4), ("update", []), parameters=8 * OF_LAYER, trainable=0)
    assert period_of(run.operations) == (0, 4, 4)
    assert sums(with_layers(run, 8, 12, OF_LAYER))["matmul"] == 6 * 6
    with pytest.raises(ValueError, match="8 layers show 4 repetitions"):
        with_layers(run, 8, 11, OF_LAYER)


def test_a_model_whose_layers_differ_is_run_with_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = program_for_speed(ROWS[545])
    asked = []

    def foreseen(piece: RowProgram) -> ForeseenRun:
        asked.append(piece.layers)
        different = [operation("matmul", size) for size in range(1, piece.layers + 1)]
        passes = ("forward", different), ("backward", different), ("update", [])
        return run_of(*passes, parameters=1000, micro_batch=piece.micro_batch)

    monkeypatch.setattr(row_runs, "foreseen", foreseen)
    # The mark of the code that foresees comes of real runs.
    monkeypatch.setattr(row_runs, "code", lambda: "now")
    monkeypatch.setattr(row_runs, "is_known", lambda piece: False)
    store = tmp_path / "runs.json.xz"
    monkeypatch.setattr(row_runs, "STORE", store)
    row_runs._stored.cache_clear()
    try:
        row_runs.add([program], store=store)
        assert asked == [few_layers(program), program.layers]
        assert row_runs.run_of(program, store) is not None
    finally:
        row_runs._stored.cache_clear()
        row_runs._of_all_layers.cache_clear()


@pytest.mark.parametrize("row_id", [34, 545, 268])
def test_a_foreseen_run_with_further_layers_has_the_flops_of_the_formulas(row_id: int) -> None:
    """MPT-7B, GPT 175B and GPT-2 52B, of which few layers were run."""
    program = program_for_speed(ROWS[row_id])
    assert few_layers(program) < program.layers / 3
    run = stored_run(program)
    assert run is not None
    formulas = formula_run({**ROWS[row_id], "grad_accum": 1})
    assert model_flops(run) == pytest.approx(model_flops(formulas), rel=0.06)
    # Learned positions are parameters too.
    assert run.parameters == pytest.approx(program.parameters, rel=0.05)
