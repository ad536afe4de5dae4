"""The replicas of an engine, and the refusal of an engine that has others than its layout."""

from types import SimpleNamespace

import pytest

from zerotune.trial_lib.deepspeed_config.overrides import replicas_of
from zerotune.trial_lib.rank import engine_watch
from zerotune.trial_lib.rank.engine_watch import refuse_other_replicas


def test_replicas_are_deepspeeds() -> None:
    assert replicas_of(SimpleNamespace(dp_world_size=4)) == 4


def test_under_ulysses_deepspeed_leaves_them_out() -> None:
    engine = SimpleNamespace(dp_world_size=None, seq_dp_world_size=8, sequence_parallel_size=4)
    assert replicas_of(engine) == 2


def test_an_engine_with_other_replicas_than_its_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch.torch.distributed, "get_world_size", lambda: 2)
    told: list[tuple[str, str]] = []
    engine = SimpleNamespace(dp_world_size=2)
    for asked in (None, 2, 1):
        refuse_other_replicas(engine, asked, lambda *said: told.append(said))
    ((outcome, reason),) = told
    assert outcome == "invalid"
    assert "makes 1 replica of the model of 2 ranks, but the engine has 2 replicas" in reason
