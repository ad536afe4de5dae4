"""DeepSpeed's AutoTP on two CPU ranks: the batches of a group, its samples, its parameters and its losses."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from zerotune.trial_lib.launch.starters import WarmStarter
from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult

SCRIPT, GLOBAL_BATCH = "divided/train.py", 4
FEW = StepWindow(start_step=2, end_step=4, max_steps=3)


@pytest.fixture(autouse=True, scope="module")
def _primed(warm_starter: WarmStarter) -> None:
    warm_starter.prime(["transformers", "transformers.models.llama.modeling_llama"])


def plan(trials: Any, group: int, *arguments: str, stage: int = 1, **options: Any) -> TrialPlan:
    """Returns the trial of a layout at the global batch that all have."""
    micro_batch = GLOBAL_BATCH * group // 2
    options = {"window": FEW, **options}
    made = trials.plan(SCRIPT, *arguments, slots=2, micro_batch=micro_batch, zero={"stage": stage}, **options)
    candidate = Candidate(
        knobs={"zero_optimization": {"stage": stage}, "tensor_parallel": {"autotp_size": group}},
        micro_batch_size=micro_batch,
        slots=2,
        data_parallel_size=2 // group,
    )
    return dataclasses.replace(made, candidate=candidate, ds_config=candidate.complete(made.ds_config))


def ran(trials: Any, made: TrialPlan) -> TrialResult:
    result = trials.start(made).result()
    assert result.outcome is Outcome.COMPLETED, result.reason
    return result


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2)), 3])
def test_both_layouts_train_alike_and_count_each_sample_once(trials: Any, stage: int) -> None:
    """The losses agree in six digits, and float32 has seven.

    They are not equal to the last digit: two ranks add up the parts of a row in another order than one rank.
    """
    replicas, group = (ran(trials, plan(trials, size, stage=stage)) for size in (1, 2))
    assert len(group.losses) >= 4
    assert group.losses == pytest.approx(replicas.losses, rel=1e-6)
    assert len(group.initial_weights) == 2
    assert group.initial_weights == pytest.approx(replicas.initial_weights, rel=1e-6)
    for result in (replicas, group):
        assert result.metrics["throughput"] * result.metrics["latency"] == pytest.approx(GLOBAL_BATCH)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"tp_overlap_comm": True}, {"vocab_parallel_lm_head": True}])
def test_groups_train_alike_with_each_of_their_settings(trials: Any, settings: dict[str, Any]) -> None:
    plain, made = (plan(trials, 2) for _ in range(2))
    config = overwrite_deepspeed_config(made.ds_config, {"tensor_parallel": settings})
    one, other = ran(trials, plain), ran(trials, dataclasses.replace(made, ds_config=config))
    assert other.losses == pytest.approx(one.losses, rel=1e-6)
    heads = ["lm_head is VocabParallelLinear" in Path(each.logs[0]).read_text() for each in (one, other)]
    assert heads == [False, "vocab_parallel_lm_head" in settings]


@pytest.mark.long
def test_stages_1_and_2_of_a_group_train_alike_to_the_last_digit(trials: Any) -> None:
    """Stage 3 is left out: on one rank alone its last digit differs from that of stage 1 too."""
    first, second = (ran(trials, plan(trials, 2, stage=stage)).losses for stage in (1, 2))
    assert first == second
    assert len(first) >= 4


@pytest.mark.long
def test_the_profile_of_a_divided_model_is_that_of_the_whole(trials: Any) -> None:
    once = {"purpose": Purpose.PROFILE, "window": StepWindow(1, 1, max_steps=1)}
    whole, divided = (ran(trials, plan(trials, size, **once)).profile for size in (1, 2))
    assert whole is not None
    assert divided is not None
    assert (whole.data_parallel_size, divided.data_parallel_size) == (2, 1)
    assert (divided.num_params, divided.trainable_num_params) == (whole.num_params, whole.trainable_num_params)
    assert divided.linear_params == whole.linear_params > whole.num_params / 2
    assert whole.head_counts == divided.head_counts == [4, 4]
    assert divided.activation_mem_per_gpu < whole.activation_mem_per_gpu


@pytest.mark.long
def test_a_loader_that_divides_the_data_over_all_ranks_is_named_and_not_measured(trials: Any) -> None:
    result = trials.start(plan(trials, 2, "--over", "ranks")).result()
    assert result.outcome is Outcome.INVALID
    assert "fed different batches" in result.reason
    assert "num_replicas=engine.dp_world_size" in result.reason
    assert not result.metrics
    ran(trials, plan(trials, 1, "--over", "ranks"))


@pytest.mark.long
def test_heads_that_the_ranks_cannot_share_evenly_are_divided_unevenly(trials: Any) -> None:
    """The witness of the rule `undivided_heads`: DeepSpeed trains on, and the first rank has two heads of three."""
    made = trials.plan("divided/train.py", "--heads", "3", slots=2, window=FEW)
    config = overwrite_deepspeed_config(made.ds_config, {"tensor_parallel": {"autotp_size": 2}})
    result = ran(trials, dataclasses.replace(made, ds_config=config))
    shown = [trials.log(result, rank) for rank in range(2)]
    assert "q_proj holds (16, 24)" in shown[0]
    assert "q_proj holds (8, 24)" in shown[1]
