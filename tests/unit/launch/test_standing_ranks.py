import json
import time

import pytest

from zerotune.trial_lib.launch import device_watch


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(device_watch, "_POLL_S", 0.01)


def test_ranks_that_stand_still_are_told_of_once(tmp_path):
    states, notes = [tmp_path / f"{rank}.json" for rank in range(2)], []
    with device_watch.noting_standing_ranks("trial 0003", states, notes.append):
        states[0].write_text(json.dumps({"kind": "works", "where": "prepare.py:8"}))
        time.sleep(0.1)
        assert notes == []
        states[1].write_text(json.dumps({"kind": "waits", "waits_in": "barrier", "where": "train.py:30"}))
        time.sleep(0.2)
    assert notes == ["trial 0003 stands still: rank 0 works at prepare.py:8; rank 1 waits in barrier at train.py:30"]


def test_ranks_all_of_which_work_do_not_stand_still(tmp_path):
    states, notes = [tmp_path / f"{rank}.json" for rank in range(2)], []
    with device_watch.noting_standing_ranks("trial 0003", states, notes.append):
        for state in states:
            state.write_text(json.dumps({"kind": "works", "where": "train.py:8"}))
        time.sleep(0.2)
    assert notes == ["trial 0003 takes long: rank 0 works at train.py:8; rank 1 works at train.py:8"]


def test_ranks_that_have_all_ended_wait_for_nothing(tmp_path):
    notes = []
    (tmp_path / "0.json").write_text(json.dumps({"kind": "ended"}))
    with device_watch.noting_standing_ranks("trial 0003", [tmp_path / "0.json"], notes.append):
        time.sleep(0.1)
    assert notes == []


def test_a_trial_that_goes_on_is_not_told_of(tmp_path):
    notes = []
    with device_watch.noting_standing_ranks("trial 0003", [tmp_path / "0.json"], notes.append):
        time.sleep(0.05)
    assert notes == []
