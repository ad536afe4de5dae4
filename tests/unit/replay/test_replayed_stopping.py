"""The rule that stops hopeless trials, replayed on a table."""

from small_table import PLAIN, SMALL_BUCKET, steady, table

from benchmarks.replay.stopping import replay_stopping


def test_a_trial_far_below_the_best_is_stopped_after_its_first_looks():
    outcome = replay_stopping(table(steady(PLAIN, 4, 1000.0), steady(SMALL_BUCKET, 4, 100.0)), orders=10)
    assert outcome.trials == 10
    assert 0 < outcome.stopped == outcome.trials - outcome.could_win
    assert outcome.wrongly == 0
    assert outcome.steps_saved == outcome.stopped * (8 - 3)


def test_trials_alike_are_not_stopped():
    outcome = replay_stopping(table(steady(PLAIN, 4, 100.0), steady(SMALL_BUCKET, 4, 99.0)), orders=10)
    assert outcome.stopped == outcome.steps_saved == 0
