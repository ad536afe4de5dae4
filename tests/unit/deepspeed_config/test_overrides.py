import contextlib
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.trial_lib.deepspeed_config.overrides import (
    DEEPSPEED_KEYS,
    config_hash,
    difference,
    get_ds_config_from_hparams,
    overwrite_deepspeed_config,
    with_open_batch,
)
from zerotune.trial_lib.messages.errors import InputError

LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
# `zero_optimization` has meanings of its own, and tests of them.
NAMES = st.sampled_from(["a", "b", "scheduler", "optimizer"])
CONFIGS = st.dictionaries(
    NAMES, st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=6), max_size=4
)


@given(CONFIGS, CONFIGS)
def test_overriding_twice_is_overriding_once(base: dict[str, Any], overrides: dict[str, Any]) -> None:
    once = overwrite_deepspeed_config(base, overrides)
    assert overwrite_deepspeed_config(once, overrides) == once


ZERO = st.booleans() | st.dictionaries(
    st.sampled_from(["stage", "cpu_offload", "cpu_offload_param", "offload_optimizer", "offload_param", "a"]),
    LEAVES | st.dictionaries(NAMES, LEAVES, max_size=2),
)
WITH_ZERO = st.builds(lambda config, zero: {**config, "zero_optimization": zero}, CONFIGS, ZERO) | CONFIGS


@given(WITH_ZERO, WITH_ZERO)
def test_a_zero_section_is_overridden_once_too_and_no_argument_changes(
    base: dict[str, Any], overrides: dict[str, Any]
) -> None:
    before = copy.deepcopy((base, overrides))
    once = overwrite_deepspeed_config(base, overrides)
    assert overwrite_deepspeed_config(once, overrides) == once
    assert overwrite_deepspeed_config(once, {}) == once
    _spoil(once)
    assert (base, overrides) == before


@given(CONFIGS, CONFIGS)
def test_neither_argument_changes_or_is_shared(base: dict[str, Any], overrides: dict[str, Any]) -> None:
    before = copy.deepcopy((base, overrides))
    _spoil(overwrite_deepspeed_config(base, overrides))
    assert (base, overrides) == before


def _spoil(value: Any) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _spoil(inner)
        value["spoilt"] = True
    elif isinstance(value, list):
        value.append("spoilt")


@given(CONFIGS)
def test_nothing_to_override_changes_nothing(base: dict[str, Any]) -> None:
    assert overwrite_deepspeed_config(base, {}) == base
    assert overwrite_deepspeed_config(base, base) == base
    assert overwrite_deepspeed_config({}, base) == base


@given(CONFIGS, CONFIGS)
def test_each_override_is_there_and_nothing_else_has_changed(base: dict[str, Any], overrides: dict[str, Any]) -> None:
    leaves = _leaves(overwrite_deepspeed_config(base, overrides))
    set_ones = _leaves(overrides)
    assert all(leaves[path] == value for path, value in set_ones.items() if value != {})
    for path, value in leaves.items():
        assert set_ones.get(path) == value or _leaves(base).get(path) == value or value == {}


def _leaves(config: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(config, dict) or not config:
        return {path: config}
    return {leaf: value for key, inner in config.items() for leaf, value in _leaves(inner, (*path, key)).items()}


def test_sections_are_merged_and_everything_else_is_replaced() -> None:
    base = {"zero_optimization": {"stage": 1, "overlap_comm": True}, "betas": [1, 2]}
    overrides = {"zero_optimization": {"stage": 2}, "betas": [3]}
    assert overwrite_deepspeed_config(base, overrides) == {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "betas": [3],
    }


def test_the_old_global_batch_goes_when_both_its_parts_are_set() -> None:
    base = {"train_batch_size": 64}
    parts = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert overwrite_deepspeed_config(base, parts) == parts
    assert overwrite_deepspeed_config(base, {"gradient_accumulation_steps": 1})["train_batch_size"] == 64


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
def test_offload_by_its_deprecated_name_is_the_section_that_deepspeed_makes_of_it(section: str) -> None:
    old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[section]

    def zero(own: bool, **overrides: Any) -> Any:
        config = overwrite_deepspeed_config({"zero_optimization": {old: own}}, {"zero_optimization": overrides})
        return config["zero_optimization"]

    assert zero(False) == {}
    assert zero(True) == {section: {"device": "cpu"}}
    # DeepSpeed refuses both names side by side.
    for own in (False, True):
        assert zero(own, **{section: {"device": "nvme"}}) == {section: {"device": "nvme"}}
        assert zero(own, **{section: None}) == {}
        assert zero(own, **{old: True}) == {section: {"device": "cpu"}}
        assert zero(own, **{old: False}) == {}


def test_an_offload_section_that_is_withdrawn_is_left_out() -> None:
    """Accelerate asks `offload_optimizer`, where it is there, for its device: None has none."""
    base = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "nvme_path": None}}}
    overrides = {"zero_optimization": {"stage": 1, "offload_optimizer": None}}
    assert overwrite_deepspeed_config(base, overrides) == {"zero_optimization": {"stage": 1}}


def test_a_zero_section_that_is_a_switch_is_a_stage() -> None:
    assert overwrite_deepspeed_config({"zero_optimization": True}, {}) == {"zero_optimization": {"stage": 1}}
    raised = overwrite_deepspeed_config({"zero_optimization": False}, {"zero_optimization": {"stage": 3}})
    assert raised == {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize("batch", [(8, 4), (4, 8), (4, 4)])
def test_a_global_batch_that_follows_from_others_is_no_longer_said(batch: tuple[int, int]) -> None:
    own = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    winner = {"train_micro_batch_size_per_gpu": batch[0], "gradient_accumulation_steps": batch[1]}
    assert overwrite_deepspeed_config(own, difference(own, winner)) == winner


@pytest.mark.parametrize("offload", [{"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}])
def test_what_takes_an_offload_away_is_a_difference(offload: dict[str, Any]) -> None:
    own = {"zero_optimization": {"stage": 2, **offload}}
    winner = overwrite_deepspeed_config(own, {"zero_optimization": {"offload_optimizer": None}})
    assert overwrite_deepspeed_config(own, difference(own, winner)) == winner


def test_a_configuration_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    hyperparameters = {"deepspeed_config": "ds.json", "overwrite_deepspeed_args": {"fp16": {"enabled": True}}}
    assert get_ds_config_from_hparams(hyperparameters, tmp_path) == {"train_batch_size": 8, "fp16": {"enabled": True}}
    assert overwrite_deepspeed_config(str(tmp_path / "ds.json"), {}) == {"train_batch_size": 8}


def test_a_configuration_may_stand_among_the_hyperparameters() -> None:
    hparams = {"lr": 0.1, "train_batch_size": 8, "overwrite_deepspeed_args": {"fp16": {"enabled": True}}}
    assert get_ds_config_from_hparams(hparams) == {"train_batch_size": 8, "fp16": {"enabled": True}}


def test_hyperparameters_without_a_configuration_are_told_which_key_is_missing() -> None:
    with pytest.raises(KeyError, match="hold no DeepSpeed configuration: add deepspeed_config, "):
        get_ds_config_from_hparams({"lr": 0.1, "optimizer": {"type": "Adam"}})


class Asked(dict[str, Any]):
    """A configuration that remembers what it was asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> "Asked":
        return self


def test_every_key_that_deepspeed_asks_a_configuration_for_is_known() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = Asked({"train_batch_size": 1})
    DeepSpeedConfig(config)
    assert {"train_batch_size", "zero_optimization", "disable_python_gc"} <= config.names
    assert config.names - DEEPSPEED_KEYS == set()


@given(CONFIGS)
def test_the_hash_does_not_depend_on_the_order_of_keys(config: dict[str, Any]) -> None:
    assert config_hash(dict(reversed(config.items()))) == config_hash(config)
    assert config_hash({**config, "new": 1}) != config_hash(config)


JSON_PIECES = st.lists(st.sampled_from([*'{}[]",: \n', '"a"', "1", "1e999", "NaN", "null", "-", "\\ud800"]))


@given(st.one_of(st.binary(), st.text().map(str.encode), JSON_PIECES.map("".join).map(str.encode)))
def test_any_file_is_a_configuration_or_an_input_error(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    with contextlib.suppress(InputError):
        assert isinstance(overwrite_deepspeed_config(path, {}), dict)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', 'the key "a" occurs twice'),
        ('{"z": {"b": 1, "c": 2, "b": 3}}', 'the key "b" occurs twice'),
        ('{"a" 1}', "ds.json:1:"),
        ("[]", "this is list"),
        ("[" * 100_000, "not usable JSON"),
        ('{"a": ' + "1" * 5000 + "}", "not usable JSON"),
    ],
    ids=["twice", "twice below", "no colon", "list", "deep", "long"],
)
def test_a_bad_file_is_told_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        overwrite_deepspeed_config(path, {})
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["", "missing.json", "nul\0.json"])
def test_a_file_that_cannot_be_opened_is_an_input_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError):
        overwrite_deepspeed_config(tmp_path / name, {})


@pytest.mark.parametrize("module", ["deepspeed_config.overrides", "messages.errors", "messages.orders"])
def test_a_rank_needs_the_standard_library_only(module: str) -> None:
    code = f"import sys, json; import zerotune.trial_lib.{module}; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.check_output([sys.executable, "-S", "-c", code], cwd=Path(__file__).parents[3]))
    outside = (
        {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"zerotune", "trial_lib", "__main__"}
    )
    assert not outside


def test_under_autotp_deepspeed_itself_derives_the_global_batch() -> None:
    base = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    assert overwrite_deepspeed_config(base, batch)["train_batch_size"] == 8
    divided = overwrite_deepspeed_config(base, {**batch, "tensor_parallel": {"autotp_size": 2}})
    # Its own product would be that of all ranks: 16.
    assert "train_batch_size" not in divided
    assert divided["train_micro_batch_size_per_gpu"] == 8


@pytest.mark.parametrize(
    ("own", "written"),
    [
        ({"train_batch_size": 4}, {"train_batch_size": 8}),
        ({"train_batch_size": "auto"}, {"train_batch_size": "auto"}),
        ({"train_micro_batch_size_per_gpu": 4}, {}),
        ({}, {"train_batch_size": 8}),
    ],
)
def test_a_global_batch_that_the_user_leaves_open_stays_open(own: dict[str, Any], written: dict[str, Any]) -> None:
    assert with_open_batch({"train_batch_size": 8}, own) == written
