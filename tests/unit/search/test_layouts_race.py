"""Several layouts of one program race as arms, each at the global batch of the user."""

from dataclasses import replace

import pytest

from tests.unit.search.adaptive_world import PROFILE, SPACE, SimulatedModel, adaptive, drive, problem, repeat, trials
from tests.unit.search.simulated_model import drive as drive_families
from tests.unit.search.simulated_model import told
from zerotune.trial_lib.deepspeed_config.layout import AUTOTP
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.search.knobs import Arm, SearchSpace, get_knob
from zerotune.trial_lib.search.methods import METHODS

TENSOR_2 = {"tensor_parallel": {"autotp_size": 2}}
LAYOUTS = SearchSpace.of_arms([*SPACE.arms, *(Arm({**arm.knobs, **TENSOR_2}, arm.fine) for arm in SPACE.arms)])


class Divided(SimulatedModel):
    """A model in which a group of two ranks trains 1.3 times as fast as two replicas."""

    factor = 1.3

    def throughput(self, candidate: Candidate) -> float:
        return super().throughput(candidate) * (self.factor if get_knob(candidate.knobs, AUTOTP) else 1.0)


class Dividing(Divided):
    """As above, 1.3 times as slow."""

    factor = 1 / 1.3


@pytest.mark.parametrize(("model", "wins"), [(Divided(), True), (Dividing(), False)])
def test_the_faster_layout_wins_and_every_candidate_keeps_the_global_batch(model: Divided, wins: bool) -> None:
    search = adaptive(problem(space=LAYOUTS, train_batch_size=48), max_trials=30)
    ran = [candidate for candidate, _ in trials(drive(search, model.run))]
    assert {get_knob(candidate.knobs, AUTOTP) for candidate in ran} == {None, 2}
    for candidate in ran:
        replicas = 1 if get_knob(candidate.knobs, AUTOTP) else 2
        assert candidate.data_parallel_size == replicas
        assert candidate.micro_batch_size * candidate.gradient_accumulation_steps * replicas == 48
    best = search.best
    assert best is not None
    assert (get_knob(best[0].knobs, AUTOTP) == 2) == wins


def test_a_layout_whose_replicas_cannot_share_the_batch_is_left_out() -> None:
    # The user trains on one group of two ranks. Of 7 samples two replicas have no equal share.
    base = {**TENSOR_2, "optimizer": {"type": "AdamW"}}
    one_rank = {"tensor_parallel": {"autotp_size": 1}}
    arms = [Arm({**arm.knobs, **each}, arm.fine) for arm in SPACE.arms for each in (TENSOR_2, one_rank)]
    profile = replace(PROFILE, data_parallel_size=1)
    asked = problem(space=SearchSpace.of_arms(arms), base_config=base, profile=profile, train_batch_size=7)
    ran = [candidate for candidate, _ in trials(drive(adaptive(asked, max_trials=30), Divided().run))]
    assert {get_knob(candidate.knobs, AUTOTP) for candidate in ran} == {2}
    assert {candidate.micro_batch_size * candidate.gradient_accumulation_steps for candidate in ran} == {7}


def test_a_search_over_layouts_replays() -> None:
    first, again = (adaptive(problem(space=LAYOUTS, train_batch_size=48), max_trials=12) for _ in range(2))
    history = drive(first, Divided().run)
    repeat(again, history)
    assert again.best == first.best


@pytest.mark.parametrize("method", ["random", "asha", "binary"])
def test_the_other_methods_count_the_replicas_of_each_family(method: str) -> None:
    found = METHODS[method]
    search = found.load()(found.settings(metric="throughput", max_trials=30), problem(space=LAYOUTS))
    ran = [candidate for candidate, _ in told(drive_families(search, Divided().run))]
    assert {(get_knob(each.knobs, AUTOTP), each.data_parallel_size) for each in ran} == {(None, 2), (2, 1)}


def test_the_answer_is_a_configuration_that_deepspeed_takes() -> None:
    """DeepSpeed takes each rank for a replica under AutoTP, and derives the batch from the rest."""
    base = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 24}
    search = adaptive(problem(space=LAYOUTS, base_config=base, train_batch_size=48), max_trials=30)
    drive(search, Divided().run)
    assert search.best is not None
    config = search.best[0].complete(base)
    assert config["tensor_parallel"] == {"autotp_size": 2}
    assert "train_batch_size" not in config
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] == 48
