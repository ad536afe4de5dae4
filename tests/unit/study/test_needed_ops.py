"""Which ops a study has built ahead, and what it leaves out where one cannot be built."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_setups import setup_of

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.inputs.search_space import read_search_space
from zerotune.trial_lib.messages.measurement import ModelProfile, ProgramProfile
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.limits import own_ops, study_space, supposed_ops, with_ops_built, without_unbuildable
from zerotune.trial_lib.study.typed_command import read_command

NO_NVCC = "CUDA_HOME does not exist, unable to compile CUDA op(s)"


def experiment_of(folder: Path, config: dict[str, Any] | None, **search_space: Any) -> Experiment:
    """Returns an experiment with a configuration; None for one that stands in the code."""
    (folder / "train.py").touch()
    (folder / "ds.json").write_text(json.dumps(config or {}))
    command = ["deepspeed", "--num_gpus", "2", "train.py", *(["--deepspeed", "ds.json"] if config else [])]
    experiment = read_command(command, {}, folder, Host("cuda", ["0", "1"], 2**30))
    return replace(experiment, requests=read_search_space(search_space))


def arguments_of(folder: Path, method: str = "adaptive") -> StudyArguments:
    return StudyArguments(command=(sys.executable,), model_dir=folder, method=method)


def adam(**zero: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2, **zero}}


QUANTIZED = {"zero_optimization.zero_quantized_weights": [False, True]}
NVME = {"offload_param": {"device": "nvme", "nvme_path": "/nvme"}}


@pytest.mark.parametrize(
    ("config", "search_space", "device", "ops"),
    [
        (adam(), {}, "cuda", ["FusedAdamBuilder", "CPUAdamBuilder"]),
        (None, {}, "cuda", ["FusedAdamBuilder", "CPUAdamBuilder"]),
        (adam() | {"optimizer": {"type": "Lion"}}, {}, "cuda", ["FusedLionBuilder", "CPULionBuilder"]),
        (adam() | {"optimizer": {"type": "Adagrad"}}, {}, "cuda", ["CPUAdagradBuilder"]),
        (adam(), QUANTIZED, "cuda", ["FusedAdamBuilder", "CPUAdamBuilder", "QuantizerBuilder"]),
        (adam(stage=3, **NVME), {}, "cuda", ["FusedAdamBuilder", "AsyncIOBuilder", "CPUAdamBuilder"]),
        (adam(), {}, "cpu", ["ShareMemCommBuilder", "FusedAdamBuilder"]),
        (adam(offload_optimizer={"device": "cpu"}), {}, "cpu", ["ShareMemCommBuilder", "CPUAdamBuilder"]),
    ],
)
def test_ops_are_those_of_the_user_s_configuration_and_then_of_what_may_be_searched(
    tmp_path: Path, config: dict[str, Any] | None, search_space: dict[str, Any], device: str, ops: list[str]
) -> None:
    experiment = experiment_of(tmp_path, config, **search_space)
    found = supposed_ops(experiment, arguments_of(tmp_path), device)
    own = own_ops(experiment, device)
    assert found[: len(own)] == own
    assert set(ops) <= set(found)
    assert set(found) - set(ops) <= {"FusedAdamBuilder"}


def test_a_method_without_offload_needs_no_op_of_it(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, adam())
    assert supposed_ops(experiment, arguments_of(tmp_path, "asha"), "cuda") == ["FusedAdamBuilder"]


class Profiled:
    """A study whose profile trial has ended.

    Args:
        folder: of the model.
        config: the user's configuration.
        optimizer: of the code.
        cannot: why ops cannot be built.
    """

    def __init__(self, folder: Path, config: dict[str, Any], cannot: dict[str, str], optimizer: str = "") -> None:
        self._config = config
        self.trial = TrialResult(
            trial_id="0",
            number=0,
            purpose=Purpose.PROFILE,
            config_hash="",
            outcome=Outcome.COMPLETED,
            profile=ModelProfile(
                num_params=10**9,
                trainable_num_params=10**9,
                activation_mem_per_gpu=1,
                gpu_mem=1,
                data_parallel_size=2,
                flops_per_sample=1.0,
            ),
            program=ProgramProfile(optimizer=optimizer),
            unbuildable=cannot,
        )
        experiment = experiment_of(folder, config, **QUANTIZED)
        self.space = study_space(setup_of(experiment, folder / "study"), config, self.trial)

    def left(self) -> tuple[set[str], list[str]]:
        """Returns the names of the arms that are left, and what is told of the others."""
        space, told = without_unbuildable(self.space, self._config, self.trial)
        return {arm.label for arm in space.arms}, told

    @property
    def all(self) -> set[str]:
        """The names of all arms."""
        return {arm.label for arm in self.space.arms}


def test_arms_that_need_an_op_that_cannot_be_built_are_left_out_in_one_sentence(tmp_path: Path) -> None:
    study = Profiled(tmp_path, adam(), {"QuantizerBuilder": NO_NVCC})
    left, (told,) = study.left()
    out = study.all - left
    assert left
    assert out
    assert all("quantized" in label for label in out)
    assert not any("quantized" in label for label in left)
    assert told.startswith(f"Not tried, because DeepSpeed's Quantizer cannot be built here ({NO_NVCC}): ")
    assert all(label in told for label in out)


def test_an_op_that_the_user_s_own_configuration_needs_leaves_nothing_out(tmp_path: Path) -> None:
    study = Profiled(tmp_path, adam(), {"FusedAdamBuilder": NO_NVCC})
    assert study.left() == (study.all, [])


def test_an_op_of_an_optimizer_that_the_code_has_is_not_needed(tmp_path: Path) -> None:
    cannot = {"CPUAdamBuilder": NO_NVCC}
    left, told = Profiled(tmp_path, adam(), cannot).left()
    assert told
    assert not any("offload-optimizer" in label for label in left)
    study = Profiled(tmp_path, adam(), cannot, optimizer="torch.optim.adamw.AdamW")
    assert study.left() == (study.all, [])


def test_where_nothing_would_be_left_the_trials_say_what_is_wrong(tmp_path: Path) -> None:
    study = Profiled(tmp_path, adam(), {"CPUAdamBuilder": NO_NVCC, "QuantizerBuilder": NO_NVCC})
    only = [arm for arm in study.space.arms if "quantized" in arm.label or "offload-optimizer" in arm.label]
    study.space = type(study.space).of_arms(only)
    assert study.left() == ({arm.label for arm in only}, [])


def test_once_the_profile_has_ended_the_ops_of_the_arms_are_built_and_what_cannot_be_is_kept(tmp_path: Path) -> None:
    asked: list[str] = []

    def build(builders: Sequence[str]) -> dict[str, str]:
        asked.extend(builders)
        return {"QuantizerBuilder": NO_NVCC, "AsyncIOBuilder": "nobody needs it here"}

    setup = setup_of(experiment_of(tmp_path, adam(), **QUANTIZED), tmp_path / "study")
    profiled = Profiled(tmp_path, adam(), {}).trial
    ended = with_ops_built(profiled, setup, build)
    assert asked == ["CPUAdamBuilder", "FusedAdamBuilder", "QuantizerBuilder"]
    assert ended.unbuildable == {"QuantizerBuilder": NO_NVCC}
    failed = replace(profiled, outcome=Outcome.CRASHED)
    assert with_ops_built(failed, setup, build) == failed
