"""The files of a plan's answer, from runs made by hand."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.foresee.plan.pretended_runs import pretended_run
from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, overwrite_deepspeed_config
from trial_lib.foresee.plan.plan_arguments import PlanArguments
from trial_lib.study.planning.open_plan import open_plan, read_plan
from trial_lib.study.planning.plan_run import run_plan

SIZES = {MICRO_BATCH: 2, ACCUMULATION: 4}


class _Foresees:
    """A program that decides on the sizes that its configuration leaves open."""

    def __call__(self, name: str, program: Any, overrides: Any, asked: Any) -> Any:
        config = overwrite_deepspeed_config({"zero_optimization": {"stage": 2}}, copy.deepcopy(dict(overrides)))
        steps = config.get(ACCUMULATION, SIZES[ACCUMULATION])
        return pretended_run(config, asked.count, config.get(MICRO_BATCH, SIZES[MICRO_BATCH]), steps)

    def prime(self, imported: Any) -> None: ...

    def end(self, name: str) -> None: ...

    def stop(self) -> None: ...


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
