"""The experiment's `search_space`, as it is read and as mistakes in it are told."""

from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.inputs.search_space import read_search_space
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.search.arms import RequestedKnob, build_space, left_out_of_space
from zerotune.trial_lib.search.effects import Surroundings
from zerotune.trial_lib.search.knobs import SearchSpace

STAGE, BUCKET = "zero_optimization.stage", "zero_optimization.reduce_bucket_size"
OVERLAP, OFFLOAD = "zero_optimization.overlap_comm", "zero_optimization.offload_optimizer.device"
HERE = Surroundings(device="cuda", slots=2, replicas=2, num_params=10**9, trainable_num_params=10**9)


def one(key: str, said: Any) -> RequestedKnob:
    (request,) = read_search_space({key: said})
    return request


def test_a_value_fixes_a_knob_and_a_list_names_its_values() -> None:
    assert one(OVERLAP, True) == RequestedKnob(OVERLAP, (True,))
    assert one(BUCKET, [10, 20, 10]).values == (10, 20)
    assert one(BUCKET, {"values": [10, 20]}).values == (10, 20)
    assert one("optimizer.params.betas", [[0.9, 0.95], [0.9, 0.999]]).values == ([0.9, 0.95], [0.9, 0.999])


def test_a_condition_names_coarse_settings() -> None:
    request = one(OVERLAP, {"values": [True, False], "when": {STAGE: [2, 3], OFFLOAD: "none"}})
    assert request.when == {STAGE: (2, 3), OFFLOAD: ("none",)}


def test_a_range_becomes_values() -> None:
    assert one(BUCKET, {"min": 0, "max": 100}).values == (0, 25, 50, 75, 100)
    assert one(BUCKET, {"min": 1_000, "max": 1_000_000, "log": True, "count": 4}).values == (
        1000,
        10_000,
        100_000,
        10**6,
    )
    assert one(BUCKET, {"min": 1, "max": 3, "count": 9}).values == (1, 2, 3)
    assert one("gradient_clipping", {"min": 0.5, "max": 1.5, "count": 3}).values == (0.5, 1.0, 1.5)


def test_5e8_is_a_whole_number_of_elements() -> None:
    (value,) = one(BUCKET, 5e8).values
    assert (value, type(value)) == (500_000_000, int)
    assert one(BUCKET, {"min": 1e6, "max": 3e6, "count": 3}).values == (10**6, 2 * 10**6, 3 * 10**6)


def test_both_names_of_a_stage_3_setting_are_one_knob() -> None:
    assert one("zero_optimization.prefetch_bucket_size", 5).path == "zero_optimization.stage3_prefetch_bucket_size"
    with pytest.raises(InputError, match="another name of a knob"):
        read_search_space(
            {"zero_optimization.prefetch_bucket_size": 5, "zero_optimization.stage3_prefetch_bucket_size": 6}
        )


def test_a_setting_of_a_newer_deepspeed_is_taken() -> None:
    assert one("zero_optimization.quite_another_thing", 1).path == "zero_optimization.quite_another_thing"
    assert one("aio.block_size", [1, 2]).path == "aio.block_size"


@pytest.mark.parametrize(
    ("key", "said", "what", "remedy"),
    [
        ("zero_optimization.overlap_com", True, "no setting", "Did you mean zero_optimization.overlap_comm?"),
        ("overlap_comm", True, "no setting", "Did you mean zero_optimization.overlap_comm?"),
        ("gradient_cliping", 1.0, "no setting", "Did you mean gradient_clipping?"),
        ("zero_optimisation.stage", 1, "no setting", "Did you mean zero_optimization.stage?"),
        ("lr", 1, "no setting", "dotted path"),
        ("zero_optimization.offload_optimizer.pin_memry", True, "no setting", "offload_optimizer.pin_memory?"),
        ("zero_optimization.offload_optimizer", {"device": "cpu"}, "is a section", "offload_optimizer.device"),
        ("bf16", True, "is a section", "bf16.enabled"),
        ("zero_optimization.cpu_offload", True, "is deprecated", "offload_optimizer.device"),
        ("train_micro_batch_size_per_gpu", [1, 2], "no knob", "--max-micro-batch"),
        ("train_batch_size", 8, "no knob", "--train-batch-size"),
        ("gradient_accumulation_steps", 8, "no knob", "--free-batch"),
        (STAGE, [1, 4], "a ZeRO stage from 0 to 3, found the number 4", "Change"),
        (STAGE, True, "a ZeRO stage from 0 to 3, found true", "Change"),
        (OVERLAP, "yes", 'true or false, found the text "yes"', "Change"),
        (BUCKET, "5e8", 'a whole number from 0 on, found the text "5e8"', "Change"),
        (BUCKET, True, "a whole number from 0 on, found true", "Change"),
        (OFFLOAD, "disk", 'none, cpu or nvme, found the text "disk"', "Change"),
        ("gradient_clipping", [{"a": 1}], "expected a value", "Change"),
        (BUCKET, [], "has no values", "at least one"),
        (BUCKET, {"value": 1}, 'unknown key "value"', 'Did you mean "values"?'),
        (BUCKET, {}, "neither values nor a range", "Write `values`"),
        (BUCKET, {"values": [1], "min": 1}, "both values and a range", "Write `values`"),
        (BUCKET, {"min": 1}, "has no max", "`min` and `max`"),
        (BUCKET, {"min": 9, "max": 1}, "min has to be below max", "Change one"),
        (BUCKET, {"min": 0, "max": 1, "log": True}, "above 0 and below max", "Change one"),
        (BUCKET, {"min": 1, "max": 2, "count": 1}, "from 2 on", "Change"),
        (BUCKET, {"min": "1", "max": 2}, "expected a number", "Change"),
        (BUCKET, {"min": 1, "max": 2, "log": 1}, "expected true or false", "Change"),
        (OVERLAP, {"min": 0, "max": 1}, "has no range", "List its values"),
        (OVERLAP, {"values": True, "when": {BUCKET: 1}}, "cannot depend on", "zero_optimization.stage"),
        (OVERLAP, {"values": True, "when": {STAGE: 7}}, "a ZeRO stage from 0 to 3", "Change"),
        (OVERLAP, {"values": True, "when": [STAGE]}, "expected a mapping", "when: {"),
        (STAGE, {"values": [1], "when": {OFFLOAD: "cpu"}}, "has no condition", "Leave `when` out"),
    ],
)
def test_a_mistake_says_what_and_where_and_what_to_do(key: str, said: Any, what: str, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        read_search_space({key: said})
    assert what in caught.value.what
    assert remedy in caught.value.remedy
    assert caught.value.where.startswith(f"search_space.{key}")
    for sentence in (caught.value.what, caught.value.remedy):
        assert sentence[-1] in ".?"


YAML = """
entrypoint: python3 train.py
hyperparameters: {deepspeed_config: {train_batch_size: 8}}
search_space:
  zero_optimization.stage: [1, 2]
  zero_optimization.overlap_comm: %s
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    (tmp_path / "train.py").touch()

    def write(overlap: str) -> Path:
        (tmp_path / "experiment.yaml").write_text(YAML % overlap)
        return tmp_path / "experiment.yaml"

    return write


def test_the_section_stands_in_the_experiment(write: Any) -> None:
    path = write("{values: [true], when: {zero_optimization.stage: 2}}")
    section = read_experiment(path, path.parent).config.search_space
    assert [request.path for request in read_search_space(section)] == [STAGE, OVERLAP]


def test_a_mistake_in_the_experiment_is_told_with_its_line_and_column(write: Any) -> None:
    path = write("often")
    with pytest.raises(InputError) as caught:
        read_experiment(path, path.parent)
    assert caught.value.where == f"{path}:6:35"
    assert caught.value.what == f'{OVERLAP}: expected true or false, found the text "often".'


def test_dsats_methods_have_its_space_and_adaptive_the_catalogues() -> None:
    assert build_space((1, 2), HERE, (), catalogue=False) == SearchSpace.for_model((1, 2), HERE.num_params, {})
    assert any("offload" in arm.label for arm in build_space((1, 2), HERE, (), catalogue=True).arms)


@pytest.mark.parametrize("catalogue", [False, True])
def test_a_section_holds_for_every_method(catalogue: bool) -> None:
    section = read_search_space({STAGE: [2], OFFLOAD: "cpu", BUCKET: [5, 6]})
    (arm,) = build_space((1, 2), HERE, section, catalogue=catalogue).arms
    assert arm.label == "z2-offload-optimizer"
    assert {knob.path: knob.values for knob in arm.fine}[BUCKET] == (5, 6)
    assert left_out_of_space((1, 2), HERE, section, catalogue=catalogue) == []
    without = read_search_space({"zero_optimization.sub_group_size": 5})
    (told,) = left_out_of_space((1, 2), HERE, without, catalogue=catalogue)
    assert "ZeRO stage 3 only" in told
