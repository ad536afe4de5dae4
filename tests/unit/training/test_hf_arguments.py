"""The arguments of a Trainer script follow the overrides of its DeepSpeed configuration."""

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.dsat import get_hf_args_with_overwrites
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.orders import SPEC_VARIABLE, TrainingSpec

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 1},
}
BATCH = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 2}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SPEC_VARIABLE, raising=False)
    (tmp_path / "ds_config.json").write_text(json.dumps(AUTO))
    return tmp_path / "ds_config.json"


def hparams(**overrides: Any) -> dict[str, Any]:
    return {"lr": 1, "overwrite_deepspeed_args": overrides}


def with_overwrites(args: list[str], **overrides: Any) -> list[str]:
    return get_hf_args_with_overwrites(args, hparams(**overrides))


def test_missing_flags_are_added_and_the_file_is_merged(config: Path) -> None:
    args = ["--deepspeed", "ds_config.json", "--do_train"]
    changed = with_overwrites(args, **BATCH, zero_optimization={"overlap_comm": True})
    added = ["--per_device_train_batch_size", "6", "--gradient_accumulation_steps", "2"]
    assert changed == [*args, *added]
    assert args == ["--deepspeed", "ds_config.json", "--do_train"]
    assert json.loads(config.read_text()) == {**AUTO, **BATCH, "zero_optimization": {"stage": 1, "overlap_comm": True}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--per_device_train_batch_size", "8"], ["--per_device_train_batch_size", "6"]),
        (["--per_device_train_batch_size=8"], ["--per_device_train_batch_size=6"]),
        (["--per-device-train-batch-size", "8"], ["--per-device-train-batch-size", "6"]),
        (["--per_device_train_batch_size", "6"], ["--per_device_train_batch_size", "6"]),
    ],
)
def test_a_flag_that_is_there_gets_the_value_in_its_own_form(
    config: Path, given: list[str], expected: list[str]
) -> None:
    changed = with_overwrites([*given, "--deepspeed=ds_config.json"], **BATCH)
    assert changed == [*expected, "--deepspeed=ds_config.json", "--gradient_accumulation_steps", "2"]


def test_auto_is_never_copied_into_the_arguments(config: Path) -> None:
    args = ["--deepspeed", "ds_config.json", "--gradient_accumulation_steps", "4"]
    changed = with_overwrites(args, train_micro_batch_size_per_gpu=6, gradient_accumulation_steps="auto")
    assert changed == [*args, "--per_device_train_batch_size", "6"]


@pytest.mark.parametrize("empty", [{}, {"overwrite_deepspeed_args": {}}, {"overwrite_deepspeed_args": None}])
def test_without_overrides_nothing_is_changed(config: Path, empty: dict[str, Any]) -> None:
    before = config.read_bytes()
    assert get_hf_args_with_overwrites(["--deepspeed", "ds_config.json"], empty) == ["--deepspeed", "ds_config.json"]
    assert get_hf_args_with_overwrites(["--do_train"], empty) == ["--do_train"]
    assert config.read_bytes() == before


def test_overrides_for_no_file_are_refused(config: Path) -> None:
    with pytest.raises(InputError, match="name no DeepSpeed configuration"):
        with_overwrites(["--do_train"], **BATCH)
    with pytest.raises(InputError, match="does not exist"):
        with_overwrites(["--deepspeed", "another.json"], **BATCH)
    with pytest.raises(InputError, match="does not exist"):
        with_overwrites(["--deepspeed", "nowhere/another.json"], **BATCH)


def test_ranks_that_call_it_at_once_find_the_file_whole(config: Path) -> None:
    calls = [["--deepspeed", str(config)]] * 24
    with ProcessPoolExecutor(8) as ranks:
        changed = list(ranks.map(get_hf_args_with_overwrites, calls, [hparams(**BATCH)] * len(calls)))
    assert all(args[2:] == changed[0][2:] for args in changed)
    assert json.loads(config.read_text()) == {**AUTO, **BATCH}
    assert [path.name for path in config.parent.iterdir()] == ["ds_config.json"]


def test_a_trial_is_followed_by_the_trainers_own_arguments(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = config.parent / "training.json"
    TrainingSpec(trial=None, hparams={}).write(spec)
    monkeypatch.setenv(SPEC_VARIABLE, str(spec))
    args = ["--deepspeed", "ds_config.json", "--per_device_train_batch_size", "8"]
    assert with_overwrites(args, **BATCH) == args
    assert json.loads(config.read_text()) == AUTO


def test_a_full_experiment_leaves_the_users_file_alone(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, scratch = config.parent / "training.json", config.parent / "scratch"
    TrainingSpec(trial=None, hparams={}, checkpoints="checkpoints", scratch=str(scratch)).write(spec)
    monkeypatch.setenv(SPEC_VARIABLE, str(spec))
    changed = with_overwrites(["--deepspeed", "ds_config.json"], **BATCH)
    assert changed[:2] == ["--deepspeed", str(scratch / "merged_ds_config.json")]
    assert json.loads(Path(changed[1]).read_text()) == {**AUTO, **BATCH}
    assert json.loads(config.read_text()) == AUTO
    assert with_overwrites(changed[:2], **BATCH)[:2] == changed[:2]
