from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.trial_lib.messages.turned import COMPILE
from zerotune.trial_lib.records.switches import PROGRAM
from zerotune.trial_lib.search.catalogue import KNOBS
from zerotune.trial_lib.search.effects import Effect
from zerotune.trial_lib.search.knobs import STAGE, set_knob
from zerotune.trial_lib.search.zero_settings import ZeroSettings, arm_key, arm_label


def config(**zero):
    return {"zero_optimization": zero}


def test_what_a_configuration_leaves_out_has_deepspeeds_default():
    settings = ZeroSettings.of({})
    assert settings.stage == 0
    assert settings.reduce_bucket_size == 500_000_000
    assert settings.contiguous_gradients
    assert settings.max_live_parameters == 1_000_000_000


def test_auto_counts_as_left_out():
    assert ZeroSettings.of(config(stage=2, reduce_bucket_size="auto")) == ZeroSettings.of(config(stage=2))


@pytest.mark.parametrize(("stage", "overlaps"), [(1, False), (2, False), (3, True)])
def test_communication_overlaps_by_default_at_stage_3_alone(stage, overlaps):
    assert ZeroSettings.of(config(stage=stage)).overlap_comm is overlaps


def test_offload_counts_where_deepspeed_does_it():
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}
    seen = [ZeroSettings.of(config(stage=stage, **offload)) for stage in range(4)]
    assert [settings.offload_optimizer for settings in seen] == ["none", "cpu", "cpu", "cpu"]
    assert [settings.offload_param for settings in seen] == ["none", "none", "none", "nvme"]


def test_stage_3s_settings_may_go_by_their_names_without_the_stage():
    long = {"stage": 3, "stage3_max_live_parameters": 7, "stage3_max_reuse_distance": 9}
    short = {"stage": 3, "max_live_parameters": 7, "max_reuse_distance": 9}
    assert ZeroSettings.of(config(**long)) == ZeroSettings.of(config(**short))
    assert ZeroSettings.of(config(**short)).max_live_parameters == 7


def test_an_offload_that_is_withdrawn_is_none():
    assert ZeroSettings.of(config(stage=2, offload_optimizer=None)).offload_optimizer == "none"


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "AdamW"}, 8),
        ({"type": "SGD"}, 0),
        ({"type": "SGD", "params": {"momentum": 0.9}}, 4),
        ({"type": "Lion"}, 4),
        ({}, 8),
    ],
)
def test_the_states_of_a_parameter_follow_from_the_optimizer(optimizer, expected):
    assert ZeroSettings.of({"optimizer": optimizer}).optimizer_bytes == expected


def test_fine_knobs_do_not_part_an_arm():
    plain = config(stage=2)
    fine = config(stage=2, reduce_bucket_size=1000, overlap_comm=True, allgather_bucket_size=10)
    assert arm_key(plain) == arm_key(fine)


def test_a_section_of_offload_that_names_no_place_offloads_nothing():
    settings = ZeroSettings.of(config(stage=3, offload_optimizer={"pin_memory": True}))
    assert settings.offload_optimizer == "none"


# A value of each kind that is not DeepSpeed's default.
OTHER_VALUES = {"switch": True, "count": 4, "size": 2, "share": 0.5}
COARSE = sorted(path for path, known in KNOBS.items() if known.is_coarse)


def configured(path: str, value: Any, effect: Effect, stage: int) -> dict[str, Any]:
    """A configuration in which a knob has an effect, apart from what only the program shows."""
    config: dict[str, Any] = {}
    for needed, values in {STAGE: (stage,), **effect.when, path: (value,)}.items():
        set_knob(config, needed, values[-1])
    return config


@pytest.mark.parametrize("path", COARSE)
def test_each_coarse_knob_of_the_catalogue_parts_arms_where_it_acts_and_not_elsewhere(path: str):
    known = KNOBS[path]
    kind = known.kind
    other = kind[-1] if isinstance(kind, tuple) else OTHER_VALUES[kind]
    value = False if known.default is True else other
    acting: set[int] = set()
    for effect in known.effects:
        for stage in effect.stages:
            without = configured(path, None, effect, stage)
            assert arm_key(configured(path, value, effect, stage)) != arm_key(without), (effect.source, stage)
            # DeepSpeed's own value makes no other arm.
            if known.default is not None:
                assert arm_key(configured(path, known.default, effect, stage)) == arm_key(without)
            acting.add(stage)
    for stage in {0, 1, 2, 3} - acting:
        plain: dict[str, Any] = config(stage=stage)
        idle = config(stage=stage)
        set_knob(idle, path, value)
        assert arm_key(idle) == arm_key(plain), stage


@pytest.mark.parametrize("word", ["lr", "betas", "weight_decay"])
def test_what_changes_the_result_alone_does_not_part_arms(word: str):
    named = [{"optimizer": {"type": "AdamW", "params": {word: value}}} for value in (1, 2)]
    assert arm_key(named[0]) == arm_key(named[1])
    assert arm_key({"gradient_clipping": 1.0, "fp16": {"enabled": True, "loss_scale": 8}}) == arm_key(
        {"scheduler": {"type": "WarmupLR"}, "fp16": {"enabled": True}}
    )


@pytest.mark.parametrize("name", ["SGD", "Lion", "Muon", "OneBitAdam"])
def test_another_optimizer_makes_another_arm(name: str):
    assert arm_key({"optimizer": {"type": name}}) != arm_key({"optimizer": {"type": "AdamW"}})


def test_deepcompile_parts_arms_if_the_model_is_compiled_or_the_code_may_do_it():
    compiled: dict[str, Any] = {**config(stage=2), PROGRAM: {COMPILE: True}}
    assert arm_key({**compiled, "compile": {"deepcompile": True}}) != arm_key(compiled)
    assert arm_key({**config(stage=2), "compile": {"offload_activation": True}}) == arm_key(config(stage=2))


@pytest.mark.parametrize(
    "other",
    [
        config(stage=2),
        config(stage=3, offload_optimizer={"device": "cpu"}),
        config(stage=3, zero_hpz_partition_size=2),
        {**config(stage=3), "bf16": {"enabled": True}},
        {**config(stage=3), "torch_autocast": {"enabled": True}},
        {**config(stage=3), "activation_checkpointing": {"partition_activations": True}},
    ],
)
def test_what_decides_memory_parts_arms(other):
    assert arm_key(config(stage=3)) != arm_key(other)


def test_an_arm_is_called_by_its_stage_and_what_it_offloads():
    cpu = {"device": "cpu"}
    assert arm_label(config(stage=1)) == "z1"
    assert arm_label(config(stage=3, offload_optimizer=cpu, offload_param=cpu)) == "z3-offload-optimizer-offload-param"


ANY = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
)
ZERO_KEYS = ("stage", "offload_optimizer", "offload_param", "reduce_bucket_size", "stage3_max_live_parameters")


def sections(keys: tuple[str, ...]) -> st.SearchStrategy[Any]:
    return ANY | st.dictionaries(st.sampled_from(keys), ANY | st.dictionaries(st.just("device"), ANY))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "zero_optimization": sections(ZERO_KEYS),
            "optimizer": sections(("type", "params")),
            "bf16": sections(("enabled",)),
            "tensor_parallel": sections(("autotp_size",)),
        },
    )
)
def test_a_configuration_that_deepspeed_refuses_has_a_label_and_a_key(refused: dict[str, Any]):
    """Its study has a report, and `zerotune show` shows it."""
    assert arm_label(refused).startswith("z")
    assert arm_key(refused)


def test_a_stage_that_is_none_is_not_called_stage_0():
    assert arm_label(config(stage=[2, 3])) == "z?"
