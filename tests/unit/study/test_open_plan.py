"""Opening a plan: what is read, what is refused, and the batch of its first run."""

from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.arms import typed_overrides
from zerotune.trial_lib.plan.plan_record import PlanArguments
from zerotune.trial_lib.study.open_plan import open_plan, read_plan
from zerotune.trial_lib.study.program import KnownProgram


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("import deepspeed\n")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 2}}')
    return tmp_path


def _arguments(folder: Path, *on: str, **fields: Any) -> PlanArguments:
    words = ("deepspeed", "--num_gpus", "8", str(folder / "train.py"), "--deepspeed_config", str(folder / "ds.json"))
    return PlanArguments(**{"command": words, "model_dir": folder, "on": on, **fields})


def test_a_command_for_gpus_that_are_not_here_is_read(folder: Path) -> None:
    read = read_plan(_arguments(folder, "h100-80gb:8", "a100-40gb:2x8", price=("h100-80gb=2.99",)))
    assert [str(each.cluster) for each in read.asked] == ["h100-80gb:8", "a100-40gb:2x8"]
    assert read.asked[0].price == 2.99
    assert read.base_config["train_batch_size"] == 64


@pytest.mark.parametrize(
    ("on", "fields", "said"),
    [
        (("h100-80gb:3",), {}, "a global batch of 64 samples cannot be divided over 3 replicas"),
        (("h100:8",), {}, '"h100" may be h100-80gb, .* or .*. Write one of them, such as h100-80gb.'),
        (("h100-81gb:8",), {}, "The nearest: h100-80gb"),
        (("h100-80gb:8",), {"price": ("cheap",)}, "is no price"),
        (("h100-80gb:8",), {"devices": Path("/nowhere.yaml")}, "cannot be read"),
        (("h100-80gb:8",), {"train_batch_size": 12}, "a global batch of 12 samples cannot be divided"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(
    folder: Path, on: tuple[str, ...], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        read_plan(_arguments(folder, *on, **fields))
    assert not (folder / "zerotune-plans").exists()


def test_a_batch_that_is_free_may_be_divided_over_any_number(folder: Path) -> None:
    assert read_plan(_arguments(folder, "h100-80gb:3", free_batch=True)).asked[0].count == 3


def test_the_folder_is_its_owners_alone(folder: Path, tmp_path: Path) -> None:
    read = read_plan(_arguments(folder, "h100-80gb:8"))
    opened = open_plan(read, tmp_path, tmp_path / "scratch")
    assert opened.paths.root.parent.name == "zerotune-plans"
    assert opened.paths.root.stat().st_mode & 0o777 == 0o700
    program = opened.program(
        "z1-mbs1-of8", 8, {**read.base_config, "train_micro_batch_size_per_gpu": 1}, KnownProgram()
    )
    named = program.arguments[program.arguments.index("--deepspeed_config") + 1]
    assert named == str(tmp_path / "scratch" / "z1-mbs1-of8" / "ds_config.json")
    assert Path(named).read_text().count("train_micro_batch_size_per_gpu") == 1
    assert (folder / "ds.json").read_text().startswith('{"train_batch_size": 64')


def test_the_settings_of_the_allocator_are_those_of_the_programs_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_plan(_arguments(folder, "h100-80gb:8"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert open_plan(read, folder, folder / "scratch").allocator.expandable_segments
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:lots")
    with pytest.raises(InputError, match="max_split_size_mb:lots"):
        open_plan(read, folder / "other", folder / "scratch")
    assert not (folder / "other").exists()


@pytest.mark.parametrize(
    ("config", "count", "micro", "accumulation"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}, 16, 4, 1),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 3}, 4, 2, 8),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 8, 4, 2),
        ({"train_batch_size": 64}, 8, 8, 1),
    ],
)
def test_the_first_run_has_a_batch_that_goes_on_so_many_ranks(
    config: dict[str, Any], count: int, micro: int, accumulation: int
) -> None:
    assert typed_overrides(config, count) == {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * count,
    }


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"train_micro_batch_size_per_gpu": "auto"},
        {"train_micro_batch_size_per_gpu": 4},
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 16},
    ],
)
def test_a_batch_that_goes_anywhere_stays_as_typed(config: dict[str, Any]) -> None:
    assert typed_overrides(config, 8) == {}
