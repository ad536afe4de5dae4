"""Which losses are the user's own but for rounding, and which are of another training."""

import itertools
import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from zerotune.trial_lib.messages.measurement import WeightChange
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.study.loss_agreement import LossAgreement, LossCourse, changes_of_mathematics, compare
from zerotune.trial_lib.study.weight_changes import FirstUpdates

COURSE = [5.67, 5.62, 5.60, 5.53, 4.95, 4.72, 4.18]


def judge(
    own: list[list[float]],
    other: list[list[float]],
    micro_batch: int = 2,
    accumulation: int = 8,
    config: dict[str, Any] | None = None,
    own_config: dict[str, Any] | None = None,
    weights: tuple[list[list[float]], list[list[float]]] = ([], []),
    formats: tuple[str, ...] = (),
    skipped: tuple[list[list[int]], list[list[int]]] = ([], []),
) -> LossAgreement:
    """Compares with a user's configuration of micro-batch 2, accumulation 8."""
    mine, theirs = (
        Candidate(micro_batch_size=size, gradient_accumulation_steps=steps, slots=2, data_parallel_size=2)
        for size, steps in ((2, 8), (micro_batch, accumulation))
    )
    return compare(
        LossCourse(mine, own_config or {}, own, weights[0], formats, skipped[0]),
        LossCourse(theirs, config or own_config or {}, other, weights[1], formats, skipped[1]),
    )


def scaled(*factors: float) -> list[float]:
    return [loss * factor for loss, factor in zip(COURSE, factors, strict=False)]


def test_losses_that_differ_by_rounding_agree() -> None:
    agreement = judge([COURSE] * 3, [scaled(*[1 + 2e-7] * 7)] * 3)
    sentence = (
        "the losses of the first 7 steps agree; the change of the weights was not compared, because it could not be "
        "read, and the losses would show a training that learns nothing"
    )
    assert agreement == LossAgreement(is_compared=True, agrees=True, sentence=sentence)


def test_rounding_may_grow_with_what_is_learnt_but_not_stand_in_the_first_step() -> None:
    assert judge([COURSE], [scaled(1, 1, 1, 1, 1.00005, 1.00008, 1.00009)]).agrees
    assert not judge([COURSE], [scaled(1, 1, 1.002, 1.003, 1.004, 1.005, 1.006)]).agrees
    first = judge([COURSE], [scaled(*[1.003] * 7)])
    assert not first.agrees
    assert first.sentence == "the loss of step 1 is 5.68701, with your configuration 5.67"


def test_losses_that_do_not_show_whether_a_training_learns_are_said_not_to() -> None:
    flat = [2.0 - 0.001 * step for step in range(7)]
    agreement = judge([flat], [flat], own_config={"bf16": {"enabled": True}})
    assert agreement.sentence.endswith("and the losses would not show a training that learns nothing")


def test_half_precision_rounds_more() -> None:
    off = [scaled(*[1.005] * 7)]
    assert judge([COURSE], off, own_config={"bf16": {"enabled": True}}).agrees
    assert not judge([COURSE], off, own_config={"bf16": {"enabled": False}}).agrees


@pytest.mark.parametrize(
    ("formats", "most"),
    [
        (("float32",), 2.0**-23 + 2.0**-20),
        (("float32", "tf32"), 2.0**-10 + 2.0**-20),
        (("float32", "float64"), 2.0**-23 + 2.0**-20),
        (("bfloat16", "float32"), 2.0**-7 + 2.0**-20),
        (("float16", "tf32"), 2.0**-10 + 2.0**-20),
        (("float8_e4m3fn", "float32"), 2.0**-3 + 2.0**-20),
    ],
)
def test_rounding_is_what_the_code_computes_in_and_not_the_configuration_alone(
    formats: tuple[str, ...], most: float
) -> None:
    within, beyond = ([scaled(*[1 + share * most] * 7)] for share in (0.9, 1.2))
    assert judge([COURSE], within, formats=formats).agrees
    assert not judge([COURSE], beyond, formats=formats).agrees


def half(skipped: int, steps: int = 16, left: float = 0.7, seed: int = 5) -> list[float]:
    """The losses of a training that skips its first steps: each batch is its own, an update leaves so much."""
    batches = [random.Random(seed + number).gauss(0.0, 0.05) for number in range(steps)]
    return [3.0 * left ** max(0, number - skipped) + batch for number, batch in enumerate(batches)]


FP16 = {"fp16": {"enabled": True}}


@pytest.mark.parametrize(("ours", "alike"), [(2, 3), (5, 4)])
def test_where_loss_scaling_skips_other_steps_losses_are_compared_after_as_many_updates(ours: int, alike: int) -> None:
    steps = [[*range(1, 4)]], [[*range(1, ours + 1)]]
    found = judge([half(3)], [half(ours)], accumulation=8, own_config=FP16, skipped=steps)
    assert found.agrees, found.sentence
    assert found.sentence == (
        f"the losses of the first {alike} steps agree; then the loss scaling skips other steps, and those after as "
        "many updates agree as far as their noise shows"
    )
    # As if no step had been skipped, each loss is another one's: of the batch before, or of an update less.
    assert not judge([half(3)], [half(ours)], accumulation=8, own_config=FP16).agrees


def test_where_loss_scaling_skips_other_steps_another_training_is_told_all_the_same() -> None:
    skipped = [[1, 2, 3]], [[1, 2]]
    found = judge([half(3)], [half(2, left=1.0)], accumulation=8, own_config=FP16, skipped=skipped)
    assert not found.agrees
    assert found.sentence.endswith("those after as many updates do not agree")
    first = judge([half(3)], [[4.0, *half(2)[1:]]], accumulation=8, own_config=FP16, skipped=skipped)
    assert first.sentence.startswith("the loss of step 1 is 4, ")


def test_steps_that_all_have_skipped_are_no_difference() -> None:
    skipped = [[1, 2], [1, 2]], [[1, 2]]
    found = judge([half(2)] * 2, [half(2)], accumulation=8, own_config=FP16, skipped=skipped)
    assert found.sentence.startswith("the losses of the first 16 steps agree; ")


def test_a_program_without_a_seed_differs_from_itself_and_may_from_its_candidates() -> None:
    def unseeded(seed: int) -> list[float]:
        draws = random.Random(seed)
        return [loss + draws.gauss(0, 0.3) for loss in COURSE]

    assert all(
        judge(
            [unseeded(seed + repeat) for repeat in range(3)], [unseeded(seed + repeat) for repeat in range(3, 6)]
        ).agrees
        for seed in range(0, 600, 6)
    )


def on_other_draws(seed: int, shift: float = 0.0) -> list[float]:
    draws = random.Random(seed)
    return [2.3 + shift + draws.gauss(0, 0.2) for _ in range(10)]


def test_another_micro_batch_draws_otherwise_and_is_compared_with_the_noise_of_the_batches() -> None:
    agreements = [
        judge([on_other_draws(seed)] * 3, [on_other_draws(seed + 1)] * 3, micro_batch=4, accumulation=4)
        for seed in range(0, 400, 2)
    ]
    assert sum(agreement.agrees for agreement in agreements) >= 195
    assert agreements[0].sentence.startswith("the losses of the first 10 steps agree as far as their noise shows; ")
    apart = judge([on_other_draws(1)], [on_other_draws(2, shift=1.0)], micro_batch=4, accumulation=4)
    assert not apart.agrees


@pytest.mark.parametrize("factor", [2.0, 0.5, 4.0, 0.25])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_factor_that_the_program_gives_its_losses_with_the_accumulation_is_not_the_candidates(
    factor: float, noise: float
) -> None:
    draws = random.Random(7)
    other = [factor * (loss + draws.gauss(0, noise)) for loss in COURSE]
    agreement = judge([COURSE] * 3, [other] * 3, micro_batch=4, accumulation=4)
    assert (agreement.is_compared, agreement.agrees) == (True, True)
    assert f"but for the factor {factor:g}, which the program gives them" in agreement.sentence


def test_a_factor_that_the_accumulation_does_not_explain_is_of_another_training() -> None:
    for factor in (1.5, 0.6, 3.0):
        assert not judge([COURSE], [scaled(*[factor] * 7)], micro_batch=4, accumulation=4).agrees
    assert not judge([COURSE], [scaled(*[2.0] * 7)]).agrees  # the same accumulation
    apart = judge([COURSE], [scaled(*[1.3] * 7)], micro_batch=4, accumulation=4)
    assert apart.sentence.endswith("before any update: the loss depends on the micro-batch itself")


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_candidate_that_learns_nothing_is_found_out_whatever_its_factor(factor: float) -> None:
    stands = judge([COURSE], [[factor * COURSE[0]] * len(COURSE)], micro_batch=4, accumulation=4)
    assert not stands.agrees
    assert stands.sentence.startswith(f"the loss of step 2 is {factor * 5.67:.6g}, with your configuration")


LEARNING = [2.10, 2.02, 2.05, 1.95, 1.93, 1.85, 1.88, 1.78]
OTHER_WEIGHTS = ([[1.0, 4.0]], [[3.0, 4.0]])


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_from_other_initial_weights_a_course_may_start_elsewhere_and_has_to_come_as_far(micro_batch: int) -> None:
    options: dict[str, Any] = {"micro_batch": micro_batch, "accumulation": 16 // micro_batch}
    near = [loss + 0.02 * 0.9**step for step, loss in enumerate(LEARNING)]
    assert not judge([LEARNING], [near], weights=([[1.0, 4.0]], [[1.0, 4.0]])).agrees
    agreement = judge([LEARNING], [near], weights=OTHER_WEIGHTS, **options)
    assert agreement.agrees
    assert agreement.sentence.startswith("the program's initial weights are others than with your configuration (loss ")
    stands = judge([LEARNING], [[near[0]] * 8], weights=OTHER_WEIGHTS, **options)
    assert not stands.agrees
    assert stands.sentence.endswith("and from there the losses of 8 steps do not agree")


def test_initial_weights_that_nobody_knows_prove_nothing() -> None:
    off = [scaled(*[1.003] * 7)]
    for own, other in (([[]], [[]]), ([[1.0, 4.0]], [[]]), ([[1.0, 4.0]], [[1.0, 4.0 + 1e-9]])):
        agreement = judge([COURSE], off, weights=(own, other))
        assert not agreement.agrees
        assert "initial weights" not in agreement.sentence


@cache
def trained(seed: int, optimizer: str) -> list[float]:
    """Trains a small network on one batch, from initial weights of its own."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(16, 32), torch.randint(0, 8, (16,))
    torch.manual_seed(seed)
    hidden = [torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(64, 8))
    rule = torch.optim.SGD(model.parameters(), 0.1) if optimizer == "sgd" else torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(16):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        losses.append(loss.item())
        loss.backward()
        rule.step()
        rule.zero_grad()
    return losses


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.long)])
def test_one_training_from_other_weights_is_not_turned_away_for_the_luck_of_its_start(optimizer: str) -> None:
    courses = [trained(seed, optimizer) for seed in range(1, 16)]
    pairs = list(itertools.permutations(range(15), 2))
    agreements = [
        judge([courses[one]], [courses[other]], weights=([[one, 1.0]], [[other, 1.0]])) for one, other in pairs
    ]
    assert sum(not agreement.agrees for agreement in agreements) <= len(pairs) / 100
    stand_still = [
        judge([courses[one]], [courses[other][:1] * 16], weights=([[one, 1.0]], [[other, 1.0]])) for one, other in pairs
    ]
    assert sum(not agreement.agrees for agreement in stand_still) >= 0.7 * len(pairs)


def test_an_initialisation_that_had_no_effect_is_another_training() -> None:
    lost = judge([LEARNING], [[loss * 10 for loss in LEARNING]], weights=OTHER_WEIGHTS)
    assert not lost.agrees
    assert lost.sentence.endswith(
        "(loss 21 at step 1, with your configuration 2.1): that far apart they are no draws of one initialisation"
    )
    # Losses around nothing, as of a policy, are as far apart from one batch to the next.
    around = [0.02, -0.03, 0.01, 0.04, -0.02, 0.0, 0.03, -0.01]
    assert judge([around], [[*around[1:], 0.02]], weights=OTHER_WEIGHTS).agrees


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.long)])
def test_a_program_that_draws_its_weights_in_each_trial_is_compared_from_where_it_starts(optimizer: str) -> None:
    courses = [trained(seed, optimizer) for seed in range(1, 16)]
    draws, groups = random.Random(1), []
    for _ in range(200):
        seeds = draws.sample(range(15), 6)
        groups.append((seeds[:3], seeds[3:]))
    agreements = [
        judge(
            [courses[seed] for seed in own],
            [courses[seed] for seed in other],
            weights=([[seed, 1.0] for seed in own], [[seed, 1.0] for seed in other]),
        )
        for own, other in groups
    ]
    assert sum(not agreement.agrees for agreement in agreements) <= len(groups) / 100
    assert agreements[0].sentence.startswith("the program draws other initial weights in each trial (loss ")


def test_another_global_batch_or_precision_is_meant_to_change_the_losses() -> None:
    larger = judge([COURSE], [scaled(*[1.5] * 7)], micro_batch=4)
    assert larger.agrees
    assert larger.sentence == "the losses were not compared with yours: train_batch_size (32 -> 64) changes them"
    half = judge([COURSE], [scaled(*[1.5] * 7)], config={"bf16": {"enabled": True}})
    assert (half.is_compared, half.sentence) == (False, "the losses were not compared with yours: bf16 changes them")


def test_a_loss_that_is_not_finite_agrees_with_nothing() -> None:
    assert not judge([COURSE], [[math.nan]], micro_batch=4).agrees


def test_a_program_that_shows_no_losses_is_not_compared() -> None:
    assert not judge([[]], [[]]).is_compared


@pytest.mark.parametrize(
    ("own", "other", "changed"),
    [
        ({}, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, []),
        ({}, {"bf16": {"enabled": False}}, []),
        ({}, {"zero_optimization": {"zero_quantized_weights": True}}, ["zero_quantized_weights"]),
        ({"fp16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}, ["fp16", "torch_autocast"]),
        ({}, {"communication_data_type": "bf16"}, ["communication_data_type"]),
        ({}, {"activation_checkpointing": {"partition_activations": True}}, []),
    ],
)
def test_where_it_is_computed_changes_no_mathematics_and_in_which_numbers_does(
    own: dict[str, Any], other: dict[str, Any], changed: list[str]
) -> None:
    assert changes_of_mathematics(own, other) == changed


def test_a_switch_that_may_change_the_training_as_the_user_says_is_not_compared() -> None:
    other = [scaled(*[1.3] * 7)]
    mine, theirs = ({"program": {"--dropout": value}} for value in (0.0, 0.1))
    assert not judge([COURSE], other, config=theirs, own_config=mine).agrees
    one = Candidate(micro_batch_size=2, gradient_accumulation_steps=8, slots=2, data_parallel_size=2)
    own, changed = (LossCourse(one, config, losses) for config, losses in ((mine, [COURSE]), (theirs, other)))
    agreement = compare(own, replace(changed, free=("--dropout",)))
    assert agreement == LossAgreement(
        is_compared=False, agrees=True, sentence="the losses were not compared with yours: --dropout changes them"
    )
    assert not compare(own, replace(changed, config=mine, free=("--dropout",))).agrees


@pytest.mark.parametrize(("size", "alike"), [(1.5, True), (4.0, False)])
def test_a_program_that_trains_on_what_it_generates_is_compared_by_the_size_of_its_steps(
    size: float, alike: bool
) -> None:
    """Its completions are other ones with another micro-batch, whatever the prompts are."""
    changes = [WeightChange(updates=3, modules=[""], sums=[row]) for row in ([1.0, 0.0], [0.0, size])]
    sizes = (Candidate(micro_batch_size=2, gradient_accumulation_steps=each, data_parallel_size=1) for each in (8, 8))
    own, other = (
        LossCourse(candidate, {}, [losses], updates=[FirstUpdates(change=change)], generates=True)
        for candidate, losses, change in zip(sizes, ([0.1, -0.2, 0.1], [0.1, 0.1, -0.1]), changes, strict=True)
    )
    assert not compare(replace(own, generates=False), other).agrees
    agreement = compare(own, other)
    assert agreement.agrees is alike
    assert "each trains on what it generates, so of the change of the weights only the size" in agreement.sentence
