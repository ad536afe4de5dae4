"""What a study's search is about: the global batch that it keeps."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_setups import setup_of

from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.messages.measurement import AcrossRows, BatchSizes, ModelProfile, ProgramProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, SwapDisk, TrialResult
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.limits import kept_batch, size_limit
from zerotune.trial_lib.study.open_search import open_search, why_micro_batch_is_kept

PROFILE = ModelProfile(
    num_params=1_000,
    trainable_num_params=1_000,
    activation_mem_per_gpu=10,
    gpu_mem=10**6,
    data_parallel_size=4,
    flops_per_sample=1e6,
)
CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}


def kept(config: dict[str, Any], **told: Any) -> int | None:
    arguments = StudyArguments(config_path=Path("a.yaml"), model_dir=Path(), **told)
    return kept_batch(arguments, config, PROFILE, logging.getLogger("test"))


def test_adaptive_keeps_the_configuration_s_global_batch() -> None:
    assert kept(CONFIG) == 2 * 3 * 4
    assert kept({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}) == 64


def test_another_global_batch_may_be_asked_for_or_none() -> None:
    assert kept(CONFIG, train_batch_size=96) == 96
    assert kept(CONFIG, free_batch=True) is None


@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_dsats_methods_let_it_grow(method: str) -> None:
    assert kept(CONFIG, method=method) is None


def test_a_batch_that_nobody_knows_cannot_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert kept({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}) is None
    assert "the global batch is not kept" in caplog.text


def large_profile(disks: Sequence[SwapDisk] = (), **more: int) -> TrialResult:
    """Returns a profile trial of a billion parameters."""
    return TrialResult(
        trial_id="s-0",
        number=0,
        purpose=Purpose.PROFILE,
        config_hash="",
        outcome=Outcome.COMPLETED,
        profile=replace(PROFILE, num_params=10**9, trainable_num_params=10**9, **more),
        swap_disks=list(disks),
    )


def test_it_is_said_which_arms_the_host_has_no_room_for(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    config = tmp_path / "experiment.yaml"
    config.write_text(
        "{name: t, entrypoint: deepspeed train.py, hyperparameters: {deepspeed_config: "
        "{train_micro_batch_size_per_gpu: 2, zero_optimization: {stage: 1}}}, max_restarts: 0}"
    )
    experiment = read_experiment(config, tmp_path)
    profile = large_profile(host_mem=10**9)
    known = [(Candidate(micro_batch_size=1), profile)]
    with caplog.at_level(logging.WARNING):
        open_search(setup_of(experiment, tmp_path / "s"), CONFIG, False, known, logging.getLogger("test"))
    assert "z2-offload-optimizer is not tried: it would keep" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        open_search(setup_of(experiment, tmp_path / "s", "cpu"), CONFIG, False, known, logging.getLogger("test"))
    assert "is not tried" not in caplog.text


def test_an_arm_that_has_run_is_tried_even_if_the_disk_seems_too_small(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "experiment.yaml"
    file.write_text(
        "{name: t, entrypoint: deepspeed train.py, max_restarts: 0, hyperparameters: {deepspeed_config: "
        "{train_micro_batch_size_per_gpu: 1, zero_optimization: {stage: 3, offload_optimizer: "
        "{device: nvme, nvme_path: /nvme}}}}}"
    )
    experiment = read_experiment(file, tmp_path)
    profile = large_profile([SwapDisk(paths=["/nvme"], free=10**6)])
    known = [(Candidate(micro_batch_size=1), profile)]
    setup, base = setup_of(experiment, tmp_path / "s"), experiment.ds_config
    with caplog.at_level(logging.WARNING):
        search = open_search(setup, base, False, known, logging.getLogger("test"))
    labels = [arm.label for arm in search.problem.space.arms]
    assert "z3-offload-optimizer-nvme" in labels
    assert not any("param-nvme" in label for label in labels)
    (said,) = [record.getMessage() for record in caplog.records if "below /nvme" in record.getMessage()]
    assert "z3-offload-optimizer-nvme," not in said


DATA = ProgramProfile(typed_batch=BatchSizes(24, 2, 3), samples_per_epoch=5)


def limit(program: ProgramProfile | None, config: dict[str, Any] = CONFIG, **told: Any) -> tuple[int, str] | None:
    arguments = StudyArguments(config_path=Path("a.yaml"), model_dir=Path(), **told)
    found = size_limit(arguments, config, PROFILE, program)
    return None if found is None else (found.size, found.by)


def test_no_size_is_above_the_global_batch_or_the_data_or_what_the_user_says() -> None:
    assert limit(None) == (2 * 3, "the global batch")
    assert limit(DATA) == (5, "the length of the data")
    assert limit(DATA, max_micro_batch=4) == (4, "--max-micro-batch")
    assert limit(DATA, method="asha") == limit(DATA, free_batch=True) == (5, "the length of the data")
    assert limit(None, free_batch=True) == limit(ProgramProfile(), free_batch=True) is None


def test_the_user_s_own_size_is_never_above_the_limit_of_the_data() -> None:
    short = replace(DATA, samples_per_epoch=1)
    assert limit(short, free_batch=True) == (2, "the length of the data")


@pytest.mark.parametrize("method", ["adaptive", "asha", "binary", "random"])
def test_no_method_asks_for_more_than_the_data_have(method: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "experiment.yaml"
    file.write_text(
        "{name: t, entrypoint: deepspeed train.py, max_restarts: 0, hyperparameters: {deepspeed_config: "
        "{train_micro_batch_size_per_gpu: 2}}}"
    )
    told: dict[str, Any] = {"free_batch": True} if method == "adaptive" else {}
    setup = setup_of(read_experiment(file, tmp_path), tmp_path / "s", method=method, max_trials=40, **told)
    profile = replace(large_profile(gpu_mem=10**15), program=DATA)
    known = [(Candidate(micro_batch_size=1), profile)]
    search = open_search(setup, CONFIG, False, known, logging.getLogger("test"))
    sizes = set()
    while (candidate := search.ask()) is not None:
        assert isinstance(candidate, Candidate)
        sizes.add(candidate.micro_batch_size)
        speed = float(candidate.micro_batch_size)
        search.tell(
            candidate,
            replace(profile, metrics={"FLOPS_per_gpu": speed, "throughput": speed}, profile=None),
        )
    assert max(sizes) == 5


@pytest.mark.parametrize(
    ("kind", "given", "is_kept"),
    [
        ("layers", {}, True),
        ("loss", {}, True),
        ("loss", {"train_batch_size": 48}, True),
        ("loss", {"train_batch_size": 33}, False),
        ("layers", {"free_batch": True}, False),
        ("layers", {"max_micro_batch": 64}, False),
        ("layers", {"method": "asha"}, False),
        ("unequal", {}, False),
        ("", {}, False),
    ],
)
def test_the_micro_batch_of_rows_that_depend_on_each_other_is_kept_unless_it_is_freed(
    kind: str, given: dict[str, Any], is_kept: bool
) -> None:
    arguments = StudyArguments(config_path=Path("a.yaml"), model_dir=Path(), **given)
    program = ProgramProfile(typed_batch=BatchSizes(96, 8, 3), across_rows=AcrossRows(kind=kind))
    assert bool(why_micro_batch_is_kept(arguments, program)) is is_kept
    assert why_micro_batch_is_kept(arguments, replace(program, across_rows=None)) == ""
