"""What `zerotune show NAME` finds where a study and a folder have one name, and what it says of a damaged plan."""

import json
from pathlib import Path

import pytest
from plan_fixtures import plan_by_hand, plan_folder
from report_fixtures import STUDY_ID, recorded_study

from zerotune.flows.planning import show_plan
from zerotune.flows.records import show_command
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.plan_record import PlannedRange, PlannedTraining, TrainingRow
from zerotune.trial_lib.records.folders import StudyPaths


def test_a_study_of_a_name_goes_before_a_folder_with_another_program_s_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = recorded_study(tmp_path)
    name = json.loads(StudyPaths(paths.root).record.read_text())["name"]
    (tmp_path / name).mkdir()
    (tmp_path / name / "plan.json").write_text("{}")
    for named in (name, STUDY_ID):
        assert show_command(named, as_json=True) == 0
        assert json.loads(capsys.readouterr().out)["study"] == STUDY_ID
    # A path names the folder.
    with pytest.raises(InputError, match="the plan is damaged"):
        show_command(f"./{name}", as_json=True)


def test_a_plan_s_folder_may_be_named_as_it_stands_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan_folder(tmp_path / "mine")
    assert show_command("mine", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["answer"]


def test_tables_of_a_plan_are_whole_in_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zerotune.flows.planning._WIDTH", 80)
    record = plan_by_hand()
    show_plan(record, plan_folder(tmp_path / "mine", record))
    out = capsys.readouterr().out
    assert "…" not in out
    assert "tokens/s" in out
    assert max(map(len, out.splitlines())) <= 80


def test_of_many_kinds_of_devices_the_terminal_has_one_table_and_the_whole_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = plan_by_hand()
    row = TrainingRow(
        device="h100-80gb",
        devices="h100-80gb:8",
        count=8,
        label="z2",
        micro_batch=4,
        accumulation=2,
        fits=0.97,
        hours=PlannedRange(value=31, low=16, high=58),
        marks=("asked",),
    )
    whole = PlannedTraining(length="3 epochs", rows=(row,), answer="The fewest devices: eight.")
    many = few.model_copy(update={"devices": 2 * few.devices, "whole": whole})
    paths, lines = plan_folder(tmp_path / "mine", few), list[str]()
    show_plan(many, paths, lines.append)
    out = capsys.readouterr().out
    assert out.count(", foreseen\n") + out.count(", foreseen ") == 1
    assert "such a table for each of 4 kinds" in out
    assert "31 (16-58)" in out
    assert "250 (130-460)" in out
    assert "The fewest devices: eight." in lines


def test_a_short_training_has_its_hours_whole_in_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zerotune.flows.planning._WIDTH", 80)
    row = TrainingRow(
        device="rtx4090-24gb",
        devices="rtx4090-24gb:1",
        count=1,
        label="z2-offload-optimizer",
        micro_batch=16,
        accumulation=1,
        fits=0.97,
        hours=PlannedRange(value=0.39, low=0.16, high=0.99),
        price=PlannedRange(value=0.17, low=0.068, high=0.44),
        marks=("asked", "fewest", "cheapest"),
        is_best=True,
    )
    record = plan_by_hand(whole=PlannedTraining(length="3 epochs", rows=(row,)))
    show_plan(record, plan_folder(tmp_path / "mine", record))
    out = capsys.readouterr().out
    assert "0.39 (0.16-0.99)" in out
    assert "0.17 (0.068-0.44)" in out
    assert "cheapest" in out
    assert "rtx4090-24gb:1 *" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("", "Start with it: sh {path}"),
        (
            "# Planned for a100-40gb:2x8: start 2 hosts of 8 ranks.\n",
            "Command:       {path}. Planned for a100-40gb:2x8: start 2 hosts of 8 ranks.",
        ),
    ],
)
def test_a_command_that_starts_other_ranks_is_not_to_be_started_as_it_is(tmp_path: Path, first: str, said: str) -> None:
    record = plan_by_hand(best_command=f"{first}deepspeed --num_gpus 8 train.py --deepspeed_config best_ds_config.json")
    paths, lines = plan_folder(tmp_path / "mine", record), list[str]()
    show_plan(record, paths, lines.append)
    assert [line for line in lines if str(paths.best_command) in line] == [said.format(path=paths.best_command)]
