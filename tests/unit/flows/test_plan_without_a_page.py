"""A plan whose page cannot be written."""

from pathlib import Path

import pytest
from plan_fixtures import plan_by_hand, plan_folder

from zerotune.flows.planning import write_page


def test_a_plan_is_complete_without_its_page(tmp_path: Path) -> None:
    chosen = plan_by_hand().chosen
    assert chosen is not None
    paths = plan_folder(tmp_path)
    for name in chosen.runs:
        paths.run(name).write_bytes(b"no run")
    told: list[str] = []
    write_page(paths, told.append)
    assert not paths.report.exists()
    assert len(told) == 1
    assert "the page was not written" in told[0]
    assert str(paths.record) in told[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_it_all_the_same(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(paths: object) -> None:
        raise error

    monkeypatch.setattr("zerotune.trial_lib.report.plan_page.write_plan_page", interrupted)
    with pytest.raises(error):
        write_page(plan_folder(tmp_path), lambda text: None)
