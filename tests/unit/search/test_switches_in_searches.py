"""Every method knows the program's switches, and leaves a value out that the program refuses."""

from dataclasses import replace

import pytest
from simulated_model import SMALL, asked, drive, ran, replay, result, told

from zerotune.trial_lib.records.candidate import Candidate, Sweep
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.arms import RequestedKnob, build_space, surroundings_of
from zerotune.trial_lib.search.base import Search, SearchProblem
from zerotune.trial_lib.search.methods import METHODS

BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 1},
    "program": {"--twice": True, "--kernel": "plain", "OMP": 1},
}
REQUESTS = (
    RequestedKnob("program.--kernel", ("refused", "plain"), coarse=True),
    RequestedKnob("program.--twice", (True, False), coarse=True),
    RequestedKnob("program.OMP", (1, 2), coarse=False),
)
SEARCHES = [name for name, method in METHODS.items() if method.confirms_winner]


def search(method: str) -> Search:
    found = METHODS[method]
    settings = found.settings(max_trials=30, zero_stages=(1, 2), max_micro_batch=16)
    here = surroundings_of(replace(result(), profile=SMALL), BASE, 4, "cpu")
    space = build_space((1, 2), here, REQUESTS, catalogue=found.has_catalogue)
    return found.load()(settings, SearchProblem(space, SMALL, BASE, 4, "cpu"))


def run(candidate: Candidate) -> TrialResult:
    switches = candidate.switches
    if switches["--kernel"] == "refused":
        return replace(result(Outcome.CRASHED), reason="argument --kernel: invalid choice: 'refused'")
    size = candidate.micro_batch_size
    return ran(size / (size + 8) * (0.5 if switches["--twice"] else 1.0) * (1.1 if switches["OMP"] == 2 else 1.0))


@pytest.mark.parametrize("method", SEARCHES)
def test_the_best_has_the_faster_switch_and_few_trials_have_a_refused_one(method: str) -> None:
    tuner = search(method)
    history = drive(tuner, run)
    candidates = [one for each in asked(history) for one in (each.candidates if isinstance(each, Sweep) else (each,))]
    assert {(one.switches["--twice"], one.switches["OMP"]) for one in candidates} >= {(True, 1), (False, 1), (False, 2)}
    assert tuner.best is not None
    assert tuner.best[0].switches == {"--kernel": "plain", "--twice": False, "OMP": 2}
    refused = [outcome for _, outcome in told(history) if outcome.outcome is Outcome.CRASHED]
    assert 1 <= len(refused) <= 4
    assert "--kernel refused" in " ".join(tuner.left_out)


@pytest.mark.parametrize("method", SEARCHES)
def test_a_record_of_a_search_with_switches_is_replayed(method: str) -> None:
    history = drive(search(method), run)
    assert drive(replay(search(method), history), run, history=history) == history
