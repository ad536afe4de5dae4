"""A search driven through a world with a virtual clock."""

from dataclasses import dataclass, field

import pytest
from small_table import LARGE_BUCKET, PHASES, PLAIN, SMALL_BUCKET, candidate, small_table, steady, table

from benchmarks.replay.driver import simulate
from benchmarks.replay.table import TableWorld
from zerotune.trial_lib.records.candidate import Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome

TRIAL, GROUP_START = sum(PHASES.values()), 6.0
WORLD = TableWorld(small_table())
BEFORE = TRIAL - PHASES["steps"] + TRIAL  # the profile trial, then the user's configuration


@dataclass
class Scripted:
    """A search that asks for what it was given."""

    asks: list
    metric = SEARCH_METRICS["throughput"]
    told: list = field(default_factory=list)
    observed: list = field(default_factory=list)
    withdrawn: list = field(default_factory=list)
    best = None
    finished = False

    def ask(self):
        return self.asks.pop(0) if self.asks else None

    def tell(self, asked, result):
        self.told.append((asked.micro_batch_size, result))
        value = result.metrics.get("throughput")
        if value is not None and (self.best is None or value > self.best[1].metrics["throughput"]):
            self.best = asked, result

    def observe(self, candidate, result):
        self.observed.append((candidate, result.purpose))

    def withdraw(self, asked, reason):
        self.withdrawn.append((asked.micro_batch_size, reason))


def sweep(knobs, *sizes, bytes_per_sample=20.0, headroom=0.0):
    return Sweep(tuple(candidate(knobs, size) for size in sizes), bytes_per_sample, headroom)


def test_every_study_pays_for_the_profile_and_the_submitted_configuration_and_shows_them():
    search = Scripted([])
    replay = simulate(search, WORLD, seed=0)
    assert replay.searched_from == BEFORE
    assert replay.trials == []
    assert search.observed == [(candidate(LARGE_BUCKET, 1), Purpose.PROFILE), (WORLD.submitted, Purpose.SUBMITTED)]


def test_trials_one_after_another_cost_all_their_phases():
    replay = simulate(Scripted([candidate(PLAIN, 4), candidate(PLAIN, 8)]), WORLD, seed=0)
    assert [trial.ended_at for trial in replay.trials] == [BEFORE + TRIAL, BEFORE + 2 * TRIAL]


def test_trials_side_by_side_share_the_clock():
    replay = simulate(Scripted([candidate(PLAIN, 4), candidate(PLAIN, 8)]), WORLD, seed=0, concurrency=2)
    assert [trial.ended_at for trial in replay.trials] == [BEFORE + TRIAL] * 2


def test_a_sweep_pays_its_start_once():
    search = Scripted([sweep(SMALL_BUCKET, 4, 8), candidate(PLAIN, 4)])
    replay = simulate(search, WORLD, seed=0)
    first, second, after = (trial.ended_at - BEFORE for trial in replay.trials)
    assert (first, second) == (GROUP_START + 9.0, GROUP_START + 18.0)
    assert after == second + PHASES["end"] + TRIAL
    assert [result.swept for _, result in search.told] == [False, True, False]


def test_a_group_ends_before_a_size_that_it_foresees_not_to_fit():
    search = Scripted([sweep(PLAIN, 4, 8, 14, 16)])
    simulate(search, WORLD, seed=0)
    assert [size for size, _ in search.told] == [4, 8]
    assert search.withdrawn == [(14, Withdrawal.MEMORY), (16, Withdrawal.MEMORY)]


def test_a_group_keeps_the_headroom():
    search = Scripted([sweep(PLAIN, 4, 8, headroom=0.5)])
    simulate(search, WORLD, seed=0)
    assert search.withdrawn == [(8, Withdrawal.MEMORY)]


def test_an_out_of_memory_ends_its_group():
    search = Scripted([sweep(PLAIN, 4, 16, 17, bytes_per_sample=1.0)])
    simulate(search, WORLD, seed=0)
    assert [result.outcome for _, result in search.told] == [Outcome.COMPLETED, Outcome.OUT_OF_MEMORY]
    assert search.withdrawn == [(17, Withdrawal.ENDED)]


def test_the_answer_is_the_submitted_configuration_until_something_is_faster():
    slower, faster = candidate(SMALL_BUCKET, 1), candidate(PLAIN, 8)
    replay = simulate(Scripted([slower, faster]), WORLD, seed=0)
    assert [trial.reported for trial in replay.trials] == [WORLD.submitted, faster]


def test_a_candidate_reads_the_same_in_every_search_of_a_seed():
    def reading(seed, asks):
        search = Scripted(asks)
        simulate(search, WORLD, seed)
        return search.told[-1][1].metrics["throughput"]

    for seed in range(5):
        alone, later = [candidate(PLAIN, 4)], [candidate(PLAIN, 8), candidate(PLAIN, 4)]
        assert reading(seed, alone) == reading(seed, later)


def steady_world():
    fast, slow = ((PLAIN, 1000.0), (LARGE_BUCKET, 100.0))
    return TableWorld(table(*(steady(knobs, size, speed) for knobs, speed in (fast, slow) for size in (1, 4, 8))))


def test_a_single_trial_that_cannot_win_ends_early_and_says_no_more_than_that():
    search = Scripted([candidate(PLAIN, 4), candidate(LARGE_BUCKET, 8), sweep(LARGE_BUCKET, 1, 8)])
    replay = simulate(search, steady_world(), seed=0, stops_hopeless=True)
    (_, fast), (_, slow), *swept = search.told
    assert fast.outcome is Outcome.COMPLETED
    assert (slow.outcome, slow.metrics, len(slow.step_times)) == (Outcome.TOO_SLOW, {}, 3)
    assert slow.phases["steps"] < PHASES["steps"]
    assert replay.trials[1].ended_at - replay.trials[0].ended_at == pytest.approx(sum(slow.phases.values()))
    assert [result.outcome for _, result in swept] == [Outcome.COMPLETED] * 2


def test_other_searches_have_their_trials_measured_to_the_end():
    search = Scripted([candidate(PLAIN, 4), candidate(LARGE_BUCKET, 8)])
    simulate(search, steady_world(), seed=0)
    assert [result.outcome for _, result in search.told] == [Outcome.COMPLETED] * 2
