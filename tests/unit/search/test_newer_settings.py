"""DeepSpeed's newer settings: searched where they are safe, varied on request where they change the mathematics."""

from typing import Any

import pytest

from tests.unit.search.arms_of_space import ZERO, adaptive, fine, here, labels, told
from zerotune.trial_lib.inputs.search_space import read_search_space
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.search.arms import CandidateNames, RequestedKnob, not_known
from zerotune.trial_lib.search.catalogue import KNOBS
from zerotune.trial_lib.study.loss_agreement import changes_of_mathematics

OPTIMIZER = f"{ZERO}.offload_optimizer"
RATIO = f"{OPTIMIZER}.ratio"
CPU = {"optimizer": {"type": "AdamW"}, ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu"}}}


def test_nothing_that_changes_the_mathematics_is_searched_without_a_request() -> None:
    for path, known in KNOBS.items():
        assert not known.changes_mathematics or all(effect.candidates is None for effect in known.effects), path


def test_a_part_of_the_optimizer_stays_on_the_device_if_it_has_sub_groups() -> None:
    # 875 million parameters a rank are one sub-group of DeepSpeed's default size, and four of a quarter of that.
    assert "offload_optimizer.ratio" not in fine(adaptive(), "z3-offload-optimizer")
    quarters = here(base={**CPU, ZERO: {**CPU[ZERO], "sub_group_size": 250_000_000}})
    offloaded = adaptive(at=quarters)
    assert fine(offloaded, "z3-offload-optimizer")["offload_optimizer.ratio"] == (1.0, 0.75, 0.5, 0.25)
    assert "offload_optimizer.ratio" not in fine(offloaded, "z3")
    assert "offload_optimizer.ratio" not in fine(offloaded, "z2-offload-optimizer")


@pytest.mark.parametrize(
    ("at", "is_split"),
    [
        ({}, True),
        ({"code_optimizer": "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"}, True),
        ({"code_optimizer": "torch.optim.adamw.AdamW"}, False),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, False),
        ({"optimizer": {"type": "Lion"}}, False),
    ],
)
def test_only_deepspeeds_own_adam_is_split(at: dict[str, Any], is_split: bool) -> None:
    base = {**CPU, "optimizer": at.get("optimizer", CPU["optimizer"])}
    asked = RequestedKnob(RATIO, (0.5,))
    assert (told(asked, at=here(base=base, optimizer=at.get("code_optimizer", ""))) == []) == is_split


def test_the_users_ratio_comes_first_and_is_withdrawn_below_stage_3() -> None:
    zero = {"stage": 3, "sub_group_size": 100_000_000, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}
    space = adaptive(at=here(base={**CPU, ZERO: zero}))
    assert fine(space, "z3-offload-optimizer")["offload_optimizer.ratio"][0] == 0.4
    of_2 = next(arm for arm in space.arms if arm.label == "z2-offload-optimizer")
    assert of_2.knobs[ZERO]["offload_optimizer"] == {"device": "cpu", "ratio": None}, "DeepSpeed refuses it there"


def test_swapping_to_nvme_is_pipelined_or_not() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 8}}
    space = adaptive(at=here(base={**CPU, ZERO: zero}))
    pipelined = {"offload_optimizer.pipeline_read", "offload_optimizer.pipeline_write"}
    assert pipelined <= fine(space, "z3-offload-optimizer-nvme").keys()
    assert not pipelined & fine(space, "z3-offload-optimizer").keys()
    # By default there are 4 buffers, and DeepSpeed fails.
    few = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
    assert not pipelined & fine(adaptive(at=here(base={**CPU, ZERO: few})), "z3-offload-optimizer-nvme").keys()


def test_super_offload_is_an_arm_where_it_is_asked_for() -> None:
    asked = (RequestedKnob(f"{OPTIMIZER}.super_offload", (True,)),)
    cores = RequestedKnob(f"{OPTIMIZER}.cpuadam_cores_perc", (0.8, 0.6))
    found = labels(adaptive(*asked, cores))
    assert "z3-offload-optimizer-super-offload" in found
    assert not any("super" in label for label in labels(adaptive()))
    assert told(cores, at=here(deepspeed="0.17.0")) == [
        f"{cores.path} has no effect: it takes DeepSpeed 0.18.0 or later, here is 0.17.0."
    ]
    assert told(*asked, at=here(device="cpu")) == [f"{asked[0].path} has no effect: it takes an accelerator."]


def test_zenflow_goes_with_an_optimizer_on_the_cpu() -> None:
    asked = RequestedKnob(f"{ZERO}.zenflow.topk_ratio", (0.1, 0.05))
    found = [label for label in labels(adaptive(asked)) if "topk" in label]
    assert found
    assert all("offload-optimizer" in label and not label.startswith("z0") for label in found)
    assert changes_of_mathematics({}, {ZERO: {"zenflow": {"topk_ratio": 0.1}}}) == ["zenflow"]


def test_deepcompile_acts_in_code_that_compiles_its_engine() -> None:
    asked = RequestedKnob("compile.deepcompile", (True, False))
    assert told(asked) == [
        "compile.deepcompile has no effect: DeepCompile acts in code that calls engine.compile(), and yours does not."
    ]
    assert not told(asked, at=here(compiles_engine=True))
    assert "z3-deepcompile" in labels(adaptive(asked, at=here(compiles_engine=True)))
    passes = RequestedKnob("compile.offload_activation", (True,))
    assert told(passes, at=here(compiles_engine=True)) == [
        "compile.offload_activation has no effect: it takes compile.deepcompile to be true."
    ]


def test_bf16_states_need_bf16_master_weights() -> None:
    states = RequestedKnob("bf16.bf16_optimizer_states", (True,))
    assert told(states, at=here(base={**CPU, "bf16": {"enabled": True}})) == [
        "bf16.bf16_optimizer_states has no effect: it takes bf16.bf16_master_weights_and_grads to be true."
    ]
    master = RequestedKnob("bf16.bf16_master_weights_and_grads", (True,))
    assert not told(states, master, at=here(base={**CPU, "bf16": {"enabled": True}}))


def test_a_setting_that_nobody_has_read_is_told_of() -> None:
    known = [RequestedKnob(path, (1,)) for path in (f"{ZERO}.stage", "optimizer.params.lr", "gradient_clipping", RATIO)]
    assert not_known([*known, RequestedKnob("compile.debug_log", (True,))]) == [
        "compile.debug_log is not known to have an effect: it is tried because you ask for it."
    ]


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (RATIO, 1.5, "a number from 0 to 1"),
        (RATIO, True, "a number from 0 to 1"),
        (f"{ZERO}.leaf_module.classes", [[1]], "a name, or a list of names"),
    ],
)
def test_a_wrong_value_is_told_of(path: str, value: object, expected: str) -> None:
    with pytest.raises(InputError, match=f"expected {expected}"):
        read_search_space({path: value})


def test_shares_have_a_range_and_names_may_be_lists() -> None:
    (ratio,) = read_search_space({RATIO: {"min": 0.5, "max": 1, "count": 3}})
    assert ratio.values == (0.5, 0.75, 1)
    (leaves,) = read_search_space({f"{ZERO}.leaf_module.classes": [["Block", "Head"], "Block"]})
    assert leaves.values == (["Block", "Head"], "Block")
    names = CandidateNames()
    zero = {"stage": 3, "leaf_module": {"classes": "Block"}}
    names.of(Candidate(knobs={ZERO: zero}, micro_batch_size=4))
    other = Candidate(knobs={ZERO: {**zero, "leaf_module": {"classes": ["Block", "Head"]}}}, micro_batch_size=4)
    assert names.of(other) == "z3-mbs4-leaf-classes=Block+Head"
