"""The sentences of a plan's answer."""

from typing import Any

from zerotune.trial_lib.plan.answer import answer_of, best_of, configuration, fewest_sentence, plan_answer, why_of
from zerotune.trial_lib.plan.plan_record import PlannedArm, PlannedCount, PlannedDevices, PlannedRange

GIB = 2.0**30


def _range(value: float) -> PlannedRange:
    return PlannedRange(value=value, low=0.8 * value, high=1.2 * value)


def _arm(label: str = "z2", rate: float | None = 40.0, **fields: Any) -> PlannedArm:
    return PlannedArm(
        **{
            "label": label,
            "fits": 0.97,
            "largest_micro_batch": 8 if rate else 0,
            "micro_batch": 8,
            "accumulation": 4,
            "samples_per_s": None if rate is None else _range(rate),
            "peak": _range(60 * GIB),
            "peak_moment": "backward",
            "memory": {"parameter": 15 * GIB, "optimizer": 12 * GIB, "logits": 20 * GIB, "activation": 13 * GIB},
            "seconds": {"compute": 0.8, "reducing": 0.15, "update": 0.05, "data": 0.0},
            **fields,
        }
    )


def _devices(*arms: PlannedArm, best: str = "", **fields: Any) -> PlannedDevices:
    given = {"device": "h100-80gb", "nodes": 1, "per_node": 8, "usable": 79 * GIB, "arms": arms, "best": best}
    return PlannedDevices(**{**given, **fields})


def test_the_answer_names_the_configuration_and_its_foreseen_speed() -> None:
    arm = _arm(tokens_per_s=_range(82_000), mfu=_range(0.43), cost=_range(11.27))
    assert answer_of(_devices(arm, best="z2")) == (
        "On 8 h100-80gb: ZeRO 2, micro-batch 8, accumulation 4: foreseen 40 samples/s (32 to 48), 82,000 tokens/s, "
        "MFU 43 %, 11.27 for a billion tokens. It fits with over 95 %."
    )


def test_why_says_what_bounds_memory_and_time() -> None:
    memory, time = why_of(_devices(_arm(), best="z2"))
    assert memory == (
        "Memory: 60.0 GiB of 79.0 GiB at the peak, in the backward pass: 27.0 GiB states (parameters, gradients, "
        "optimizer), 20.0 GiB logits and the loss and 13.0 GiB activations. The largest part is 45 % of it."
    )
    parts = "computing 80 %, reducing gradients 15 % and the optimizer's update 5 %"
    assert time == f"Time: a step takes 1 s, of which {parts}."


def test_if_nothing_fits_the_nearest_arm_and_the_fewest_devices_are_named() -> None:
    arms = (_arm("z2", None, fits=0.001), _arm("z3-offload-optimizer", None, fits=0.002, peak=_range(100 * GIB)))
    counts = (PlannedCount(devices=8), PlannedCount(devices=16, label="z3", micro_batch=1))
    told = answer_of(_devices(*arms, counts=counts, fewest=16))
    assert told == (
        "On 8 h100-80gb: nothing fits. The nearest is ZeRO 2, micro-batch 8, accumulation 4: it needs 60.0 GiB of "
        "79.0 GiB. The fewest h100-80gb on which it trains: 16."
    )


def test_the_cheapest_tokens_win_if_all_have_a_price_and_else_the_fastest() -> None:
    dear = _devices(_arm(rate=90.0, cost=_range(20)), best="z2")
    cheap = _devices(_arm(rate=40.0, cost=_range(10)), best="z2")
    unpriced = _devices(_arm(rate=50.0), best="z2")
    nothing = _devices(_arm(rate=None))
    assert best_of([dear, cheap, nothing]) == 1
    assert best_of([cheap, unpriced]) == 1
    assert best_of([nothing]) is None
    fast = _devices(_arm(rate=90.0, cost=_range(20)), best="z2", nodes=2)
    assert (
        plan_answer([fast, cheap], 1)
        == f"{answer_of(cheap)} It costs least. h100-80gb:2x8 is faster, with 90 samples/s."
    )
    assert plan_answer([cheap, unpriced], 1) == answer_of(unpriced)


def test_a_device_is_called_faster_only_if_it_is_and_its_speed_has_three_digits() -> None:
    cheap = _devices(_arm(rate=0.40, cost=_range(10)), best="z2")
    fast, equal = (_devices(_arm(rate=rate, cost=_range(20)), best="z2", nodes=2) for rate in (0.452, 0.4039))
    assert plan_answer([cheap, fast], 0).endswith(" It costs least. h100-80gb:2x8 is faster, with 0.452 samples/s.")
    assert plan_answer([cheap, equal], 0) == answer_of(cheap)


def test_several_devices_without_a_fit_are_one_sentence() -> None:
    small, large = _devices(_arm(rate=None)), _devices(_arm(rate=None), nodes=2)
    assert plan_answer([small, large], None) == (
        "Nothing fits on h100-80gb:8 and h100-80gb:2x8. It trains on no number of h100-80gb up to 8."
    )


def test_offload_and_single_devices_are_said_in_words() -> None:
    arm = _arm("z3-offload-optimizer-offload-param")
    assert configuration(arm) == "ZeRO 3 with offload optimizer and offload param, micro-batch 8, accumulation 4"
    assert fewest_sentence(_devices(fewest=1)) == "It trains on a single h100-80gb already."
