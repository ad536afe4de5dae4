"""What an experiment is: what belongs to its fingerprint, what does not, and how a change is said."""

import os
from pathlib import Path
from typing import Any

import pynvml
import pytest
import yaml

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study import fingerprint
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.fingerprint import Fingerprint, fingerprint_of
from zerotune.trial_lib.study.setup import StudySetup

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


class Submitted:
    """An experiment in a folder of its own, on a host with four processors."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        (self.model / "layers").mkdir(parents=True)
        (self.model / "train.py").write_text("import layers.block\n")
        (self.model / "layers" / "block.py").write_text("")
        self.config = folder / "experiment.yaml"
        self.host = Host("cpu", ["0", "1", "2", "3"], 4 * 2**30)
        self.include: tuple[Path, ...] = ()
        self.write()

    def write(self, variables: dict[str, str] | None = None, **changed: Any) -> None:
        """Writes the YAML, with other values in the DeepSpeed configuration."""
        self.config.write_text(
            yaml.safe_dump(
                {
                    "name": "team",
                    "entrypoint": "deepspeed train.py",
                    "hyperparameters": {"deepspeed_config": {**BASE, **changed}},
                    "environment": {"environment_variables": variables or {}},
                }
            )
        )

    def fingerprint(self, **told: Any) -> Fingerprint:
        arguments = StudyArguments(config_path=self.config, model_dir=self.model, include=self.include, **told)
        experiment = read_experiment(self.config, self.model)
        paths = StudyPaths(self.model.parent / "study")
        return fingerprint_of(StudySetup.now("s", 0.0, experiment, arguments, paths, self.host))


@pytest.fixture
def submitted(tmp_path: Path) -> Submitted:
    return Submitted(tmp_path)


def profiled(**fields: Any) -> TrialResult:
    profile = {"num_params": 1000, "trainable_num_params": 1000, "activation_mem_per_gpu": 1, "gpu_mem": 1}
    return TrialResult(
        trial_id="s-0",
        number=0,
        purpose=Purpose.PROFILE,
        config_hash="0",
        outcome=Outcome.COMPLETED,
        profile=ModelProfile(**{**profile, "data_parallel_size": 1, "flops_per_sample": 1.0}),
        **fields,
    )


def test_an_experiment_that_is_left_alone_stays_the_same(submitted: Submitted) -> None:
    before = submitted.fingerprint()
    assert submitted.fingerprint().changes_since(before) == []
    assert Fingerprint.model_validate_json(before.model_dump_json()) == before


def test_code_that_is_edited_new_or_gone_is_named(submitted: Submitted) -> None:
    before = submitted.fingerprint()
    (submitted.model / "train.py").write_text("import layers.other\n")
    (submitted.model / "layers" / "block.py").unlink()
    (submitted.model / "layers" / "other.py").write_text("")
    now = submitted.fingerprint()
    assert now.changed_since(before) == ["code"]
    assert now.changes_since(before) == ["layers/block.py (gone)", "layers/other.py (new)", "train.py (edited)"]


def test_included_code_belongs_to_it(submitted: Submitted, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "losses.py").write_text("")
    (tmp_path / "one.py").write_text("")
    submitted.include = (library, tmp_path / "one.py")
    before = submitted.fingerprint()
    (library / "losses.py").write_text("x = 1\n")
    (tmp_path / "one.py").write_text("x = 1\n")
    assert submitted.fingerprint().changes_since(before) == ["library/losses.py (edited)", "one.py (edited)"]


@pytest.mark.parametrize(
    "path",
    [
        "data/train.bin",
        "metrics.csv",
        "training.log",
        "log.txt",
        "results/loss.txt",
        "events.out.tfevents.1",
        ".git/hooks/x.py",
        "__pycache__/train.py",
        "zerotune-studies/team-1/trials/0000/ds_config.json",
        "checkpoint-500/trainer_state.json",
        "outputs/run.json",
        "wandb/settings.json",
        ".venv/lib/x.py",
    ],
)
def test_what_trainings_and_tools_leave_behind_does_not(submitted: Submitted, path: str) -> None:
    before = submitted.fingerprint()
    file = submitted.model / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("left behind")
    assert submitted.fingerprint() == before


def test_where_the_command_itself_writes_to_does_not(submitted: Submitted) -> None:
    answer = submitted.model / "answer.json"
    answer.touch()
    standard_error = os.dup(2)
    try:
        with answer.open("w") as file:
            os.dup2(file.fileno(), 2)
        before = submitted.fingerprint()
        answer.write_text("{}")
        assert submitted.fingerprint() == before
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
    assert "answer.json" in submitted.fingerprint().code


def test_the_texts_that_say_what_is_installed_do(submitted: Submitted) -> None:
    before = submitted.fingerprint()
    (submitted.model / "requirements-dev.txt").write_text("torch")
    assert submitted.fingerprint().changes_since(before) == ["requirements-dev.txt (new)"]


def test_an_environment_in_the_model_directory_does_not(submitted: Submitted) -> None:
    before = submitted.fingerprint()
    (submitted.model / "env").mkdir()
    (submitted.model / "env" / "pyvenv.cfg").write_text("")
    (submitted.model / "env" / "x.py").write_text("")
    assert submitted.fingerprint() == before


def test_data_do_not_whatever_they_are_called(submitted: Submitted) -> None:
    before = submitted.fingerprint()
    (submitted.model / "corpus.txt").write_text("word " * 300_000)
    (submitted.model / "samples").mkdir()
    for number in range(2001):
        (submitted.model / "samples" / f"{number}.json").touch()
    assert submitted.fingerprint() == before


def test_what_cannot_be_read_to_its_end_does_not_nor_what_a_link_leads_to(submitted: Submitted, tmp_path: Path) -> None:
    before = submitted.fingerprint()
    os.mkfifo(submitted.model / "pipe.py")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.py").touch()
    (submitted.model / "linked").symlink_to(tmp_path / "elsewhere")
    assert submitted.fingerprint() == before


def test_of_very_much_code_a_part_is_looked_at(submitted: Submitted, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not submitted.fingerprint().is_cut_off
    monkeypatch.setattr(fingerprint, "_MOST_FILES", 1)
    found = submitted.fingerprint()
    assert found.is_cut_off
    assert list(found.code) == ["train.py"]


def test_a_host_without_gpus_of_its_own_has_a_fingerprint(
    submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", none)
    submitted.host = Host("cuda", ["0"], 2**30)
    assert "GPU" not in submitted.fingerprint().hardware


def test_the_configuration_is_said_with_both_values(submitted: Submitted) -> None:
    before = submitted.fingerprint()
    submitted.write(optimizer={"type": "Adam", "params": {"lr": 0.2}}, gradient_clipping=1.0)
    assert submitted.fingerprint().changes_since(before) == [
        "deepspeed.gradient_clipping not set -> 1.0",
        "deepspeed.optimizer.params.lr 0.1 -> 0.2",
    ]


def test_a_secret_is_neither_kept_nor_said(submitted: Submitted) -> None:
    submitted.write({"HF_TOKEN": "hf_first"})
    before = submitted.fingerprint()
    submitted.write({"HF_TOKEN": "hf_second"})
    now = submitted.fingerprint()
    assert now == before
    assert "hf_" not in now.model_dump_json()
    submitted.write({"HF_TOKEN": "hf_second", "HUB": "https://hub/hf_second"})
    assert "hf_" not in str(submitted.fingerprint().configuration)
    assert "https://hub/<redacted>" in str(submitted.fingerprint().configuration)


def test_variables_that_libraries_read_belong_to_it(submitted: Submitted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    before = submitted.fingerprint()
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("SHLVL", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert submitted.fingerprint().changes_since(before) == ["NCCL_ALGO not set -> Ring"]


def test_other_hardware_is_told(submitted: Submitted) -> None:
    before = submitted.fingerprint()
    submitted.host = Host("cpu", ["0", "1"], 8 * 2**30)
    now = submitted.fingerprint()
    assert now.changed_since(before) == ["hardware"]
    assert now.changes_since(before) == ["memory of a slot (GiB) 4.0 -> 8.0", "slots 4 -> 2"]


def test_the_profile_trial_adds_versions_and_the_model(submitted: Submitted) -> None:
    begun = submitted.fingerprint()
    before = begun.with_profile(profiled(versions={"torch": "2.6.0"}))
    now = begun.with_profile(profiled(versions={"torch": "2.7.0", "triton": "3.3"}))
    assert now.changes_since(before) == ["torch 2.6.0 -> 2.7.0", "triton not set -> 3.3"]
    assert before.model["parameters"] == "1,000"


def test_a_more_thorough_search_is_a_change(submitted: Submitted) -> None:
    before = submitted.fingerprint()
    now = submitted.fingerprint(max_trials=90, method="random")
    assert now.changes_since(before) == ["max_trials 50 -> 90", "method adaptive -> random"]


def test_of_many_changes_the_rest_is_counted(submitted: Submitted) -> None:
    before = submitted.fingerprint()
    for number in range(12):
        (submitted.model / f"part{number:02}.py").write_text("")
    changes = submitted.fingerprint().changes_since(before)
    assert len(changes) == 9
    assert changes[-1] == "and 4 more"


def test_keys_that_have_no_effect_here_belong_to_it(submitted: Submitted) -> None:
    submitted.config.write_text(submitted.config.read_text() + "workspace: w\nresources: {resource_pool: a100}\n")
    assert {"workspace", "resources.resource_pool"} <= submitted.fingerprint().configuration.keys()
