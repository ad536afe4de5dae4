"""Candidates that differ have names that differ, and names stay short."""

from itertools import combinations
from typing import Any

import pytest

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.search.arms import CandidateNames
from zerotune.trial_lib.search.catalogue import KNOBS


def candidate(size: int = 16, stage: int | None = 2, **zero: Any) -> Candidate:
    knobs = {} if stage is None else {"zero_optimization": {"stage": stage, **zero}}
    return Candidate(knobs=knobs, micro_batch_size=size)


def names_of(*candidates: Candidate) -> list[str]:
    names = CandidateNames()
    return [names.of(candidate) for candidate in candidates]


FIRST = {"reduce_bucket_size": 500_000_000, "overlap_comm": True, "stage3_prefetch_bucket_size": 471_040}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, "z2-mbs16"),
        ({"reduce_bucket_size": 50_000_000}, "z2-mbs16-bucket=50M"),
        ({"reduce_bucket_size": 471_040}, "z2-mbs16-bucket=471040"),
        ({"overlap_comm": False}, "z2-mbs16-no-overlap"),
        ({"overlap_comm": False, "reduce_bucket_size": 10**9}, "z2-mbs16-bucket=1G-no-overlap"),
        ({"stage3_prefetch_bucket_size": 0}, "z2-mbs16-prefetch=0"),
        ({"not_in_the_catalogue": "fast"}, "z2-mbs16-not_in_the_catalogue=fast"),
    ],
)
def test_a_name_shows_the_fine_knobs_that_differ_from_the_first_of_its_arm(changed: dict[str, Any], name: str) -> None:
    assert names_of(candidate(4, **FIRST), candidate(16, **{**FIRST, **changed})) == ["z2-mbs4", name]


def test_a_name_shows_the_coarse_knobs_that_are_on_and_each_arm_has_a_first_of_its_own() -> None:
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    unpinned = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    off = {"offload_optimizer": {"device": "none"}}
    assert names_of(
        candidate(stage=3, overlap_comm=True, **off),
        candidate(stage=3, overlap_comm=False, **offload),
        candidate(stage=3, overlap_comm=False, **unpinned),
        candidate(stage=None),
    ) == [
        "z3-mbs16",
        "z3-offload-optimizer-mbs16",
        "z3-offload-optimizer-mbs16-no-pinned-optimizer",
        "mbs16",
    ]


def test_every_two_values_of_a_fine_knob_have_two_names() -> None:
    for path, knob in KNOBS.items():
        if knob.is_coarse:
            continue
        key = path.removeprefix("zero_optimization.")
        values: list[Any] = [True, False] if knob.kind == "switch" else [0, 1, 999, 1000, 1001, 10**6, 10**9, 1_100_000]
        section, _, inner = key.partition(".")
        candidates = [candidate(**({section: {inner: value}} if inner else {key: value})) for value in values]
        named = names_of(*candidates)
        assert all(one != other for one, other in combinations(named, 2)), named


def test_no_two_knobs_share_a_word() -> None:
    words = [knob.word for knob in KNOBS.values() if knob.word]
    assert len(words) == len(set(words))
