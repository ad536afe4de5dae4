"""The report's figure of memory shows what the search believed before each trial."""

import pytest

from tests.unit.search.test_foreseen_bytes import BASE, GIB, MIB, PROFILE, arm, candidate
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import Memory
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.report.study_view import memory_views
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MemoryModel
from zerotune.trial_lib.study.open_search import foreseen_in, keep_arms


def ended(number, above, **more):
    memory = Memory(peak=[3 * GIB + above], after_initialize=[3 * GIB], available=[20 * GIB])
    told = {"purpose": Purpose.SEARCH, "outcome": Outcome.COMPLETED, "memory": memory, "trained_on": "cuda", **more}
    return TrialResult(trial_id=f"s-{number}", number=number, config_hash=str(number), **told)


CANDIDATES = {0: candidate(1), 1: candidate(4), 2: candidate(8)}
RESULTS = {
    0: ended(0, GIB, purpose=Purpose.PROFILE, profile=PROFILE),
    1: ended(1, 6 * GIB),
    2: ended(2, 9 * GIB),
}


def test_the_model_of_a_study_that_foresaw_its_arms_begins_with_them():
    shown = memory_views(BASE, CANDIDATES, RESULTS, (arm(),))
    model = MemoryModel(MemoryBasis(PROFILE, BASE, 4, "cuda", (arm(),)))
    model.observe_profile(CANDIDATES[0], RESULTS[0])
    for number in (1, 2):
        believed = model.above_initialize(CANDIDATES[number])
        model.observe(CANDIDATES[number], RESULTS[number])
        assert shown[number].predicted.value == pytest.approx(believed.value)
    by_formula = memory_views(BASE, CANDIDATES, RESULTS)
    assert abs(by_formula[1].predicted.value - shown[1].predicted.value) > 100 * MIB


def test_the_arms_of_a_study_survive_its_file(tmp_path):
    file = tmp_path / "foreseen.json"
    assert foreseen_in(file) == ()
    keep_arms((arm(), arm(3)), file)
    assert foreseen_in(file) == (arm(), arm(3))


@pytest.mark.parametrize("text", ["no", "[1]", '[{"ds_config": {}}]', '[{"initialize": [1, 2]}]'])
def test_a_damaged_file_of_arms_is_told(tmp_path, text):
    (tmp_path / "foreseen.json").write_text(text)
    with pytest.raises(InputError, match="foreseen arms is damaged"):
        foreseen_in(tmp_path / "foreseen.json")
