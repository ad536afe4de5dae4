"""The files of a plan's answer, from runs made by hand."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plan.pretended_runs import pretended_run
from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    overwrite_deepspeed_config,
)
from zerotune.trial_lib.plan.plan_record import PlanArguments
from zerotune.trial_lib.study.open_plan import open_plan, read_plan
from zerotune.trial_lib.study.plan_run import run_plan

SIZES = {MICRO_BATCH: 2, ACCUMULATION: 4}


class _Foresees:
    """A program that decides on the sizes that its configuration leaves open."""

    def __init__(self, **found: Any) -> None:
        self._found = found
        self.typed: list[tuple[str, int]] = []

    def __call__(self, name: str, program: Any, overrides: Any, asked: Any) -> Any:
        self.typed.append((program.arguments[-1], overrides.get(MICRO_BATCH, 0) * asked.count))
        config = overwrite_deepspeed_config({"zero_optimization": {"stage": 2}}, copy.deepcopy(dict(overrides)))
        steps = config.get(ACCUMULATION, SIZES[ACCUMULATION])
        run = pretended_run(config, asked.count, config.get(MICRO_BATCH, SIZES[MICRO_BATCH]), steps)
        return dataclasses.replace(run, program={**run.program, **self._found})

    def prime(self, imported: Any) -> None: ...

    def end(self, name: str) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(("typed", "written"), [({TRAIN_BATCH: "auto"}, "auto"), ({}, None), ({TRAIN_BATCH: 64}, 64)])
def test_the_answer_leaves_the_global_batch_open_where_the_user_does(
    tmp_path: Path, typed: dict[str, Any], written: object
) -> None:
    (tmp_path / "train.py").write_text("import deepspeed\n")
    (tmp_path / "ds.json").write_text(json.dumps({**typed, **SIZES, "zero_optimization": {"stage": 2}}))
    command = ("deepspeed", "--num_gpus", "8", "train.py", "--deepspeed_config", "ds.json")
    asked = PlanArguments(command=command, model_dir=tmp_path, on=("h100-80gb:8",))
    opened = open_plan(read_plan(asked), tmp_path, tmp_path / "scratch")
    record = run_plan(opened, _Foresees(), 1)
    assert record.chosen is not None
    assert record.chosen.ds_config[TRAIN_BATCH] == 64
    assert json.loads(opened.paths.best_ds_config.read_text()).get(TRAIN_BATCH) == written


@pytest.mark.parametrize("by_trainer", [False, True])
def test_ranks_that_divide_a_batch_are_given_that_of_all_of_them(tmp_path: Path, by_trainer: bool) -> None:
    (tmp_path / "train.py").write_text("import deepspeed\n")
    (tmp_path / "ds.json").write_text(json.dumps({MICRO_BATCH: "auto", "zero_optimization": {"stage": 2}}))
    words = ("deepspeed", "--num_gpus", "8", "train.py", "--deepspeed_config", "ds.json", "--batch_size", "16")
    told: dict[str, Any] = {"arg_mappings": {MICRO_BATCH: "--batch_size"}, "on": ("h100-80gb:8", "h100-80gb:4")}
    asked = PlanArguments(command=words, model_dir=tmp_path, free_batch=True, **told)
    opened = open_plan(read_plan(asked), tmp_path, tmp_path / "scratch")
    foresees = _Foresees(divided_among=8, batch={MICRO_BATCH: 2} if by_trainer else {})
    record = run_plan(opened, foresees, 1)
    first, *others = foresees.typed
    assert first == ("16", 0)
    assert others
    assert [typed for typed, _ in others] == [str(of_all) for _, of_all in others]
    assert record.chosen is not None
    assert record.best is not None
    size, ranks = record.chosen.ds_config[MICRO_BATCH], record.devices[record.best].count
    assert f"--batch_size {size * ranks}" in record.best_command
    # The Trainer compares its file with the argument.
    written = json.loads(opened.paths.best_ds_config.read_text())
    assert written[MICRO_BATCH] == size * (ranks if by_trainer else 1)
