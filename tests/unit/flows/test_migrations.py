"""A database that cannot be migrated, and why."""

from pathlib import Path

import pytest

from zerotune.flows import prefect_server
from zerotune.flows.prefect_server import ServerError, migrate


@pytest.mark.parametrize(
    ("output", "said"),
    [("RuntimeError: can't start new thread", "its limit of processes"), ("database is locked", "Move it away.")],
)
def test_the_remedy_follows_from_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, said: str
) -> None:
    monkeypatch.setattr(prefect_server, "run_to_end", lambda *_: (1, f"Traceback\n{output}"))
    with pytest.raises(ServerError, match=said) as raised:
        migrate("It failed to migrate", [], {}, tmp_path, tmp_path / "log", remedy="Move it away.")
    assert ("Move it away." in str(raised.value)) == (said == "Move it away.")
