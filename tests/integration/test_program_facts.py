"""What the profile trial finds out about a program that decides which candidates are worth a trial."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Protocol

import pytest
from conftest import Trials

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import TrialResult

OWN = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
PROGRAM = """
import json
import deepspeed, torch

OWN = json.load(open("own.json"))
{made}
for _ in range(3):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
"""


class Run(Protocol):
    """Runs a program that makes its engine as given."""

    def __call__(self, made: str, as_typed: bool = False, **knobs: Any) -> TrialResult: ...


@pytest.fixture
def run(trials: Trials, tmp_path: Path) -> Run:
    def run_program(made: str, as_typed: bool = False, **knobs: Any) -> TrialResult:
        folder = tmp_path / "program"
        folder.mkdir(exist_ok=True)
        (folder / "own.json").write_text(json.dumps(OWN))
        (folder / "train.py").write_text(PROGRAM.format(made=made))
        window = StepWindow(1, 1, max_steps=1)
        plan = trials.plan("train.py", model_dir=folder, config_flag="--any", window=window, purpose=Purpose.PROFILE)
        candidate = Candidate(knobs=knobs, micro_batch_size=1)
        return trials.start(dataclasses.replace(plan, candidate=candidate, as_typed=as_typed)).result()

    return run_program


OF_DEEPSPEED = """
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=OWN)
"""
OF_CODE = """
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.Adagrad(model.parameters()), config=OWN)
"""


def test_it_tells_which_optimizer_the_code_makes(run: Run) -> None:
    by_code, by_deepspeed = run(OF_CODE).program, run(OF_DEEPSPEED).program
    assert by_code is not None
    assert (by_code.optimizer, by_code.by_accelerate) == ("torch.optim.adagrad.Adagrad", False)
    assert by_deepspeed is not None
    assert by_deepspeed.optimizer == ""


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_model_that_only_the_engine_partitions_is_not_the_codes_to_partition(run: Run, stage: int) -> None:
    result = run(OF_DEEPSPEED, zero_optimization={"stage": stage})
    assert result.outcome == "completed", result.reason
    assert result.program is not None
    assert not result.program.partitions_its_model


PARTITIONED = """
with deepspeed.zero.Init(config_dict_or_path=OWN):
    model = torch.nn.Linear(4, 1)
print("partitioned:", hasattr(model.weight, "ds_id"))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=OWN)
"""


GIVEN = """
model = torch.nn.Linear(4, 1)
deepspeed.zero.Init(model, config_dict_or_path=OWN)
print("partitioned:", hasattr(model.weight, "ds_id"))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=OWN)
"""


@pytest.mark.parametrize(
    ("made", "stage"),
    [
        (PARTITIONED, 0),
        pytest.param(PARTITIONED, 2, marks=pytest.mark.long),
        (PARTITIONED, 3),
        (GIVEN, 2),
    ],
)
def test_code_that_partitions_its_model_itself_does_so_at_stage_3_only(
    run: Run, trials: Trials, made: str, stage: int
) -> None:
    result = run(made, zero_optimization={"stage": stage})
    assert result.outcome == "completed", result.reason
    assert f"partitioned: {stage == 3}" in trials.log(result)
    assert result.program is not None
    assert result.program.partitions_its_model


CHECKPOINTED = """
deepspeed.init_distributed()
deepspeed.checkpointing.configure(None, {arguments})
print("in CPU memory:", deepspeed.checkpointing.CPU_CHECKPOINT)
"""


@pytest.mark.parametrize(
    ("arguments", "by_file"),
    [
        ("OWN", True),
        ("num_checkpoints=2", False),
        pytest.param("'own.json'", True, marks=pytest.mark.long),
        pytest.param("OWN, checkpoint_in_cpu=False", False, marks=pytest.mark.long),
    ],
)
def test_activation_checkpointing_follows_the_candidate_where_the_code_goes_by_the_configuration(
    run: Run, trials: Trials, arguments: str, by_file: bool
) -> None:
    made = CHECKPOINTED.format(arguments=arguments) + OF_DEEPSPEED
    result = run(made, activation_checkpointing={"cpu_checkpointing": True})
    assert result.outcome == "completed", result.reason
    assert result.program is not None
    assert result.program.reads_activation_checkpointing == by_file
    assert f"in CPU memory: {by_file}" in trials.log(result)


EXPERTS = """
import deepspeed.moe.layer, deepspeed.moe.utils

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = deepspeed.moe.layer.MoE(4, torch.nn.Linear(4, 4), num_experts=2, min_capacity=0)

    def forward(self, inputs):
        return self.layer(inputs)[0]

deepspeed.init_distributed()
model = Experts()
groups = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(
    {"params": list(model.parameters()), "name": "all"}
)
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=OWN)
"""


@pytest.mark.long
def test_it_tells_a_mixture_of_experts_which_deepspeed_refuses_at_stage_3(run: Run) -> None:
    result = run(EXPERTS, zero_optimization={"stage": 1})
    assert result.outcome == "completed", result.reason
    assert result.program is not None
    assert result.program.has_experts
    refused = run(EXPERTS, zero_optimization={"stage": 3})
    assert refused.outcome == "invalid"
    assert "MoE is not supported with ZeRO Stage 3" in refused.reason


ADDS_GRADIENTS = """
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=OWN)
for _ in range(3):
    for _ in range({passes}):
        engine.backward({model}(torch.ones(1, 4)).sum())
    engine.step()
raise SystemExit
"""


@pytest.mark.parametrize(("passes", "repeats"), [(1, False), (2, True)])
def test_it_tells_whether_the_code_adds_gradients_up_by_itself(passes: int, repeats: bool, run: Run) -> None:
    result = run(ADDS_GRADIENTS.format(model="engine", passes=passes), as_typed=True)
    assert result.outcome == "completed", result.reason
    assert result.program is not None
    assert result.program.repeats_backward == repeats


def test_a_batch_is_counted_that_goes_past_the_engine(run: Run) -> None:
    result = run(ADDS_GRADIENTS.format(model="model", passes=1))
    assert (result.outcome, result.micro_batch_arrived) == ("completed", 1), result.reason


IN_EVAL_MODE = """
model = torch.nn.Linear(4, 1)
{before}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=OWN)
{after}
for _ in range(3):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
raise SystemExit
"""


@pytest.mark.parametrize(("before", "after"), [("model.eval()", ""), ("", "engine.eval()")])
def test_a_program_that_trains_in_eval_mode_is_counted(before: str, after: str, run: Run) -> None:
    result = run(IN_EVAL_MODE.format(before=before, after=after))
    assert (result.outcome, result.micro_batch_arrived) == ("completed", 1), result.reason
