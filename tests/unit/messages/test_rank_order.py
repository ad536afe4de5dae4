"""What a driver orders of its ranks arrives whole, and nothing else arrives."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from zerotune.trial_lib.messages.measurement import Arrival
from zerotune.trial_lib.messages.orders import RankOrder, SizeOrder, StepWindow, TrainingOrder, exact_record

SIZE = SizeOrder(
    window=StepWindow(2, 4),
    memory_limit=2**30,
    to_beat=3.5,
    longest_sequence=512,
    flops_per_sample=1e9,
    formats=("bf16", "fp32"),
    arrival=Arrival(varies=True),
    arguments=["--lr", "0.1"],
    environment={"BATCH": "4", "ONCE": None},
    overrides={"zero_optimization": {"stage": 2}},
    with_profile=False,
    logs=["/s/log"],
    measurements=["/s/measurement"],
    failures=["/s/failure"],
    states=["/s/state"],
    engine_built=["/s/built"],
)
ORDER = RankOrder(
    program={"script": "train.py"},
    local_rank_option="--local_rank",
    model_dir="/code",
    scratch="/s/scratch",
    protected_before=12.5,
    patience_s=30.0,
    device="cpu",
    launched_at=["a boot", 13.0, 1e9],
    sizes=(SIZE, SIZE),
    withdrawal="/s/withdrawal",
    bytes_per_sample=10.0,
    headroom=0.05,
)
TRAINING = TrainingOrder(
    program={"module": "train"},
    local_rank_option="",
    arguments=[],
    ds_config={"train_batch_size": 8},
    is_in_code=True,
    device=None,
    finished=["/s/finished"],
    failures=["/s/failure"],
)


def sent(order: RankOrder | TrainingOrder) -> dict[str, Any]:
    """Returns an order as it arrives."""
    arrived: dict[str, Any] = json.loads(json.dumps(asdict(order)))
    return arrived


def test_an_order_arrives_as_it_was_sent() -> None:
    assert RankOrder.from_json(sent(ORDER)) == ORDER
    assert exact_record(TrainingOrder, sent(TRAINING)) == TRAINING


@pytest.mark.parametrize("place", [(), ("sizes", 1), ("sizes", 0, "window"), ("sizes", 0, "arrival")])
def test_an_order_with_a_key_too_many_or_too_few_is_refused_by_name(place: tuple[Any, ...]) -> None:
    plain = sent(ORDER)
    part: Any = plain
    for key in place:
        part = part[key]
    name = next(iter(part))
    part["surplus"] = part.pop(name)
    with pytest.raises(ValueError, match=f"`{name}` is missing, `surplus` is unknown"):
        RankOrder.from_json(plain)


def test_an_order_to_train_with_a_key_too_many_or_too_few_is_refused_by_name() -> None:
    plain = sent(TRAINING)
    plain["surplus"] = plain.pop("device")
    with pytest.raises(ValueError, match="`device` is missing, `surplus` is unknown"):
        exact_record(TrainingOrder, plain)


def test_an_order_without_sizes_is_refused() -> None:
    plain = sent(ORDER)
    del plain["sizes"]
    with pytest.raises(ValueError, match="`sizes` is missing"):
        RankOrder.from_json(plain)


def test_only_a_profile_as_typed_shows_typed_facts() -> None:
    shows = [
        replace(SIZE, as_typed=as_typed, with_profile=with_profile).is_typed_profile
        for as_typed in (False, True)
        for with_profile in (False, True)
    ]
    assert shows == [False, False, False, True]
