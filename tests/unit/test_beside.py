"""Tests that run beside each other: what their workers share, and what each has for itself."""

from pathlib import Path

import beside_fixtures
import pytest


def test_workers_share_a_folder_and_take_other_slots_first(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path("/tmp/pytest-of-me/pytest-7")
    for worker, slots in (("gw0", ["0", "1", "2"]), ("gw1", ["1", "2", "0"]), ("gw4", ["1", "2", "0"])):
        monkeypatch.setattr(beside_fixtures, "_WORKER", worker)
        assert beside_fixtures.shared_folder(root / f"popen-{worker}" / "test_a0") == root
        assert beside_fixtures.own_first(["0", "1", "2"]) == slots


def test_a_test_alone_has_its_own_folder_and_the_slots_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_fixtures, "_WORKER", "")
    assert beside_fixtures.shared_folder(Path("/tmp/pytest-7/test_a0")) == Path("/tmp/pytest-7/test_a0")
    assert beside_fixtures.own_first(["0", "1"]) == ["0", "1"]
