"""Switches that a rank turns in a program that has no word of them: each has its effect, and losses agree."""

import re
from dataclasses import replace
from typing import Any

import pytest
from conftest import PROGRAMS

from zerotune.trial_lib.launch.starters import WarmStarter
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult

ONE_STEP = StepWindow(1, 1, max_steps=1)
DECODER = ("transformer.py", "--layers", "4", "--hidden", "64", "--length", "32")
CHECKPOINTING, COMPILE = "model:activation_checkpointing", "model:compile"


def ran(trials: Any, turned: dict[str, Any], *program: str, **settings: Any) -> TrialResult:
    plan = replace(trials.plan(*program, **settings), turned=turned)
    result: TrialResult = trials.start(plan).result()
    assert result.outcome is Outcome.COMPLETED, result.reason
    return result


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.long)])
def test_recomputed_blocks_keep_fewer_activations_and_the_losses(trials: Any, stage: int) -> None:
    kept: dict[str, int] = {}
    losses: dict[str, list[float]] = {}
    for kind in ("none", "full", "every_second"):
        settings = {"zero": {"stage": stage}, "window": ONE_STEP, "purpose": Purpose.PROFILE}
        result = ran(trials, {CHECKPOINTING: kind}, *DECODER, **settings)
        assert result.profile is not None
        assert result.program is not None
        kept[kind], losses[kind] = result.profile.activation_mem_per_gpu, result.losses
        assert result.program.turnable[CHECKPOINTING] == ["none", "full", "every_second"]
    assert kept["full"] < 0.5 * kept["none"]
    assert kept["full"] < kept["every_second"] < 0.8 * kept["none"]
    assert losses["none"]
    assert losses["full"] == losses["every_second"] == losses["none"]


LLAMA = {"model_dir": PROGRAMS / "turned", "window": StepWindow(2, 4, max_steps=3), "deadline_s": 500.0}
SHOWN = re.compile(r"^step \d+ graphs (\d+) attention \w+ fused (\d+) recomputed (\d+) loss ([\d.]+)$", re.MULTILINE)


def shown(trials: Any, result: TrialResult) -> tuple[list[int], set[int], set[int], list[float]]:
    """Returns the graphs of each step, the calls of fused attention, the recomputed layers, and the losses."""
    lines = SHOWN.findall(trials.log(result))
    graphs, fused, recomputed, losses = zip(*lines, strict=True)
    return [*map(int, graphs)], {*map(int, fused)}, {*map(int, recomputed)}, [*map(float, losses)]


def test_the_attention_and_the_recomputed_layers_of_a_hugging_face_model_are_others(
    trials: Any, warm_starter: WarmStarter
) -> None:
    warm_starter.prime(["transformers", "transformers.models.llama.modeling_llama"])
    own = ran(trials, {}, "train.py", **LLAMA)
    eager = ran(trials, {"model:attention": "eager", CHECKPOINTING: "every_second"}, "train.py", **LLAMA)
    full = ran(trials, {CHECKPOINTING: "full"}, "train.py", **LLAMA)
    assert [shown(trials, each)[1:3] for each in (own, eager, full)] == [({4}, {0}), ({0}, {2}), ({8}, {4})]
    losses = [shown(trials, each)[3][:4] for each in (own, eager, full)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == losses[0]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_compiled_model_makes_its_graphs_before_the_steps_that_count(trials: Any) -> None:
    own = ran(trials, {}, "train.py", "--layers", "1", **LLAMA)
    compiled = ran(trials, {COMPILE: True}, "train.py", "--layers", "1", **LLAMA)
    graphs, _, _, losses = shown(trials, compiled)
    assert shown(trials, own)[0] == [0] * len(shown(trials, own)[0])
    assert graphs[0] > 0
    assert not any(graphs[-3:])
    assert losses[:3] == pytest.approx(shown(trials, own)[3][:3], rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("itself", "switch", "reason"),
    [
        ("checkpoint", CHECKPOINTING, "your code recomputes activations by itself"),
        ("compile", COMPILE, "your code compiles by itself"),
    ],
)
def test_a_program_that_does_it_by_itself_is_left_alone(trials: Any, itself: str, switch: str, reason: str) -> None:
    settings = {**LLAMA, "window": ONE_STEP, "purpose": Purpose.PROFILE}
    result = ran(trials, {}, "train.py", "--layers", "2", "--itself", itself, **settings)
    assert result.program is not None
    assert switch not in result.program.turnable
    assert result.program.not_turnable[switch] == reason
