"""The end of a measurement that the program has come to before."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerotune.trial_lib.rank.early_finish import EarlyFinish
from zerotune.trial_lib.rank.endings import EndedEarlyError
from zerotune.trial_lib.rank.rank_consensus import FolderMailbox, RankConsensus


def test_a_program_that_catches_the_sentence_that_ends_it_is_told_it_again(tmp_path: Path) -> None:
    probe = SimpleNamespace(
        has_engine=False,
        has_finished=False,
        has_frozen_engine=False,
        thread=threading.main_thread(),
        progress={"micro_batches": 0, "steps": 0, "counted": 0},
    )
    meeting = RankConsensus(FolderMailbox([str(tmp_path / "state")]), 0, [str(tmp_path / "failure")])
    closing = EarlyFinish(probe, meeting, SimpleNamespace(leave=lambda: None))  # type: ignore[arg-type]
    said: list[str] = []

    def program() -> None:
        for _ in range(2):
            with pytest.raises(EndedEarlyError) as ended:
                closing.by_itself()
            said.append(str(ended.value))

    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    thread.join(10)
    assert said == ["The program ended without calling deepspeed.initialize."] * 2
