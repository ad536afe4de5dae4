"""Steps count where they are of one batch, and nothing is compiled in them."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerotune.trial_lib.rank import counted_steps, memory
from zerotune.trial_lib.rank.counted_steps import CountedStep, CountedSteps
from zerotune.trial_lib.rank.device import CpuDevice
from zerotune.trial_lib.rank.engine_watch import PARTS, StepClock

NO_TIME = StepClock(CpuDevice()).step_ended({})


def follow(batches: list[int], enough: int = 3) -> tuple[CountedSteps, int]:
    """Counts steps of these batches, until enough of one are; returns them, and how many the program has taken."""
    counted = CountedSteps()
    for step, batch in enumerate(batches):
        if counted.follow_batch(SimpleNamespace(train_batch_size=lambda batch=batch: batch), enough):
            return counted, step
        counted.add(CountedStep(NO_TIME, {"samples": float(batch)}), None)
    return counted, len(batches)


def samples(counted: CountedSteps) -> list[float]:
    return [step.arrived["samples"] for step in counted.steps]


def test_a_batch_that_stays_is_nothing_to_tell() -> None:
    counted, _ = follow([16] * 5)
    assert (samples(counted), counted.note) == ([16.0] * 5, "")


def test_steps_of_a_batch_that_does_not_last_do_not_count() -> None:
    counted, _ = follow([16, 16, 32, 32])
    assert samples(counted) == [32.0, 32.0]
    assert "measured at a global batch of 32" in counted.note


@pytest.mark.parametrize("later", [64, 8])
def test_the_first_batch_that_lasts_is_the_one_that_is_measured(later: int) -> None:
    counted, taken = follow([16, 16, 32, 32, 32, later, later])
    assert (samples(counted), taken) == ([32.0] * 3, 5)
    assert "measured at a global batch of 32" in counted.note


@dataclass
class Ranks:
    """Two ranks that count: one that is asked, and another whose steps take a second each."""

    compiled_there: list[bool]
    counted: CountedSteps = field(default_factory=CountedSteps)
    watch: Any = field(
        default_factory=lambda: SimpleNamespace(
            engine=SimpleNamespace(
                dp_world_size=2, train_micro_batch_size_per_gpu=lambda: 4, gradient_accumulation_steps=lambda: 1
            ),
            samples_in=lambda arrived: arrived["samples"],
        )
    )

    def most(self, values: list[float], _engine: Any) -> list[float]:
        """As `over_ranks.most`."""
        count = len(self.counted.steps)
        there = [*[1.0] * count, *(float(each) for each in self.compiled_there[:count]), *[0.0] * (count + 3)]
        return [max(pair) for pair in zip(values, there, strict=True)]


@pytest.fixture
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    here, there = request.param
    two = Ranks(there)
    monkeypatch.setattr(counted_steps, "most", two.most)
    for compiled in here:
        two.counted.add(CountedStep(NO_TIME, {"samples": 4.0}, compiled), None)
    return two


@pytest.mark.parametrize("ranks", [([True, False, False, False], [False, False, True, False])], indirect=True)
def test_a_step_in_which_any_rank_compiles_counts_on_none(ranks: Ranks) -> None:
    assert len(ranks.counted) == 4
    assert ranks.counted.agree(ranks.watch) == 8.0
    assert (len(ranks.counted), len(ranks.counted.in_use), ranks.counted.slowest) == (2, 2, [1.0, 1.0])
    # Once more, with no further step.
    ranks.counted.agree(ranks.watch)
    assert (len(ranks.counted), ranks.counted.note) == (2, "")


@pytest.mark.parametrize("ranks", [([True] * 3, [False] * 3)], indirect=True)
def test_where_all_steps_compile_they_count_if_no_other_comes(ranks: Ranks) -> None:
    ranks.counted.agree(ranks.watch)
    assert ranks.counted.slowest == []
    ranks.counted.agree(ranks.watch, is_over=True)
    assert len(ranks.counted.slowest) == 3
    assert "compiles in its measured steps" in ranks.counted.note


@pytest.mark.parametrize("ranks", [([True] * 40, [False] * 40)], indirect=True)
def test_a_program_that_compiles_on_and_on_is_measured_with_that(ranks: Ranks) -> None:
    ranks.counted.agree(ranks.watch)
    assert len(ranks.counted.slowest) == 24
    assert "compiles in its measured steps" in ranks.counted.note


@pytest.mark.parametrize(("kind", "expected"), [("cuda", 25), ("cpu", 0)])
def test_a_rank_of_a_gpu_has_its_part_of_what_the_host_with_the_least_has_free(
    kind: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(counted_steps, "available_bytes", lambda: 120)
    monkeypatch.setattr(counted_steps, "most", lambda values, engine: [max(values[0], -25.0)])
    watch = SimpleNamespace(engine=None, device=SimpleNamespace(is_apart=kind == "cuda"))
    assert counted_steps._host_bytes(watch) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("formats", "at_engine", "peak"),
    [
        (("bfloat16", "float32"), {"float32"}, "bfloat16"),
        (("float32",), {"float32"}, "float32"),
        (("float32",), {"float32", "tf32"}, "tf32"),
        (("bfloat16",), {"float16"}, None),
        (None, {"bfloat16"}, None),
    ],
)
@pytest.mark.parametrize("ranks", [([False] * 3, [False] * 3)], indirect=True)
def test_flops_are_compared_with_the_peak_of_the_numbers_that_are_multiplied(
    ranks: Ranks,
    formats: tuple[str, ...] | None,
    at_engine: set[str],
    peak: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = {"float32": 20.0, "tf32": 160.0, "bfloat16": 320.0}
    monkeypatch.setattr(counted_steps, "total", lambda values, engine: [2 * value for value in values])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(memory, "formats", lambda engine: at_engine)
    ranks.watch.device = SimpleNamespace(peak_flops=peaks.get)
    for step in ranks.counted.steps:
        step.seconds.update(dict.fromkeys(PARTS, 0.0))
        step.arrived.update(tokens=0.0, elements=4.0)
    ranks.counted.agree(ranks.watch)
    monkeypatch.setattr(counted_steps, "most", lambda values, engine: [1.0, *values[1:]])
    metrics = ranks.counted.metrics(ranks.watch, 10.0, formats)
    # Four samples of 10 FLOPs a second on each of two ranks.
    assert metrics["FLOPS_per_gpu"] == 40.0
    assert metrics.get("mfu") == (None if peak is None else 40.0 / peaks[peak])
