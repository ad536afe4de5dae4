"""What people are shown of a study's folder, whatever state it is in."""

import fcntl
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from case_fixtures import quick_first
from report_fixtures import (
    CRASH,
    MARKUP,
    OUT_OF_MEMORY,
    PICTURED,
    RUNNING,
    SECRET,
    STUDY_ID,
    change_record,
    only_history,
    recorded_study,
    study_with_failures,
)
from rich.console import Console

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import FileChange, OwnCommand
from zerotune.trial_lib.report.html_report import write_report
from zerotune.trial_lib.report.read_study import read_study
from zerotune.trial_lib.report.study_view import failure_groups
from zerotune.trial_lib.report.tables import print_study
from zerotune.trial_lib.study.folder import find_study


def test_a_finished_study_has_its_answer_what_it_changes_and_how_to_use_it(tmp_path: Path) -> None:
    view = read_study(recorded_study(tmp_path).root)
    assert view.status == "completed"
    answer = "2.53x faster than your configuration (95 % CI 2.19 to 2.92): ZeRO 0, micro-batch 64, accumulation 2"
    assert view.headline == answer
    assert view.gain_interval == (2.18535, 2.91948)
    assert view.best_command.startswith("cd /home/user/programs\ndeepspeed --num_gpus 2 raw_engine.py")
    changes = {change.setting: (change.own, change.winner) for change in view.changes}
    assert changes["zero_optimization.stage"] == (1, 0)
    assert changes["train_micro_batch_size_per_gpu"] == (2, 64)
    assert "optimizer.type" not in changes
    assert (len(view.trials), view.searched, view.failed) == (35, 22, 0)


def test_the_edits_of_the_users_files_stand_beside_the_command_that_has_them(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path)
    assert read_study(paths.root).diff == ""
    change = FileChange(path="/home/user/conf.yaml", before="batch: 2\n", after="batch: 64\n")
    own = OwnCommand(folder="/home/user", words=("train", "conf.yaml"), changes=(change,))
    paths.best.mkdir()
    paths.own_command.write_text(own.model_dump_json())
    view = read_study(paths.root)
    assert view.diff == "--- conf.yaml\n+++ conf.yaml\n@@ -1 +1 @@\n-batch: 2\n+batch: 64"
    console = Console(file=io.StringIO(), width=100)
    print_study(view, console)
    assert view.diff in console.file.getvalue()
    write_report(paths)
    assert "-batch: 2\n+batch: 64" in paths.report.read_text()


def test_the_kind_of_a_layout_is_no_change(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path)
    change_record(paths, switches={"--stages": 1}, layouts={"--stages": "pipeline"})
    assert not any("stages" in change.setting for change in read_study(paths.root).changes)


def test_what_was_measured_again_stands_beside_the_users_own(tmp_path: Path) -> None:
    own, winner = read_study(recorded_study(tmp_path).root).confirmed
    assert (own.name, own.gain, own.is_winner) == ("your configuration", None, False)
    assert (winner.micro_batch_size, winner.is_winner, winner.verdict) == (64, True, "faster")
    assert winner.gain is not None
    assert winner.gain.low < 2.53 < winner.gain.high
    assert winner.throughput is not None
    assert winner.throughput.low < winner.throughput.value < winner.throughput.high


def test_a_trial_s_throughput_has_the_interval_of_its_steps(tmp_path: Path) -> None:
    trials = {trial.number: trial for trial in read_study(recorded_study(tmp_path).root).trials}
    interval = trials[2].throughput
    assert interval is not None
    assert interval.low < interval.value < interval.high
    assert interval.high < 1.2 * interval.value


def test_memory_is_predicted_before_each_trial_is_told_and_learns_from_it(tmp_path: Path) -> None:
    views = [trial.memory for trial in read_study(recorded_study(tmp_path).root).trials if trial.memory is not None]
    assert len(views) == 34
    widths = [(view.predicted.high - view.predicted.low) / view.predicted.value for view in views]
    assert widths[-1] < widths[0] / 2
    measured = [view for view in views if view.measured is not None]
    inside = sum(view.predicted.low <= (view.measured or 0) <= view.predicted.high for view in measured)
    assert inside > 0.75 * len(measured)
    assert all(view.budget is not None and view.budget > 2**30 for view in views)


def test_a_study_from_before_trials_recorded_their_device_is_shown_without_predictions(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path)
    paths.history.write_text(
        paths.history.read_text().replace('"trained_on": "cpu",', "").replace('"trained_on":"cpu",', "")
    )
    view = read_study(paths.root)
    assert view.trials
    assert all(trial.memory is None for trial in view.trials)
    assert "device" not in view.facts


def test_failures_are_grouped_by_what_ended_them_whatever_their_numbers_and_paths(tmp_path: Path) -> None:
    oom, crash = failure_groups(read_study(study_with_failures(tmp_path).root).trials)
    assert [trial.number for trial in oom.trials] == list(OUT_OF_MEMORY)
    assert oom.micro_batches == "96 to 128"
    assert [trial.number for trial in crash.trials] == [CRASH]


def test_a_failed_trial_shows_the_log_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    trials = {trial.number: trial for trial in read_study(study_with_failures(tmp_path).root).trials}
    assert trials[35].log == "rank 1 gave up at 128"
    assert trials[35].log_path == "trials/0035/rank1.log"
    assert trials[2].log.splitlines() == ["step 1 of rank 0", "step 2 of rank 0"]


def test_an_exception_stands_in_the_place_of_the_log(tmp_path: Path) -> None:
    paths = study_with_failures(tmp_path)
    paths.trial(CRASH).failure(1).write_text(json.dumps({"traceback": "Traceback: here", "ended_early": False}))
    trials = {trial.number: trial for trial in read_study(paths.root).trials}
    assert trials[CRASH].log == "Traceback: here"


@pytest.mark.parametrize("file", ["best_ds_metrics.json", "best_ds_config.json"])
@pytest.mark.parametrize("text", ['{"half":', "[]"])
def test_an_answer_that_was_damaged_is_bad_input_and_names_its_file(file: str, text: str, tmp_path: Path) -> None:
    paths = recorded_study(tmp_path)
    (paths.root / file).write_text(text)
    with pytest.raises(InputError, match=rf"{file}: the study's answer is damaged"):
        read_study(paths.root)


@pytest.mark.parametrize("file", ["best_ds_metrics.json", "best_ds_config.json", "best_command.txt"])
def test_a_study_that_a_file_of_its_answer_is_missing_from_shows_no_answer(file: str, tmp_path: Path) -> None:
    paths = recorded_study(tmp_path)
    (paths.root / file).unlink()
    view = read_study(paths.root)
    assert (view.gain, view.best_config, view.best_command) == (None, None, "")
    assert len(view.trials) == 35


def test_a_long_log_is_cut_to_its_end(tmp_path: Path) -> None:
    paths = study_with_failures(tmp_path)
    paths.trial(CRASH).log(1).write_text("".join(f"line {number}\n" for number in range(100_000)))
    trials = {trial.number: trial for trial in read_study(paths.root).trials}
    assert trials[CRASH].log.splitlines()[-1] == "line 99999"
    assert len(trials[CRASH].log.splitlines()) == 50


def test_logs_are_found_where_a_study_s_folder_has_been_moved_to(tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.move(study_with_failures(tmp_path).root, moved)
    trials = {trial.number: trial for trial in read_study(moved).trials}
    assert trials[35].log == "rank 1 gave up at 128"


def test_no_secret_is_in_what_a_page_shows_and_the_owner_sees_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "inherited-secret")
    paths = study_with_failures(tmp_path, reason=f"Could not log in with {SECRET}.")
    paths.trial(CRASH).log(0).write_text("inherited-secret")
    paths.trial(36).log(1).write_text("said inherited-secret aloud")
    answer = json.loads(paths.best_ds_metrics.read_text())
    answer["confirmation"]["own"]["losses"] = f"{SECRET} in the losses"
    paths.best_ds_metrics.write_text(json.dumps(answer))
    view = read_study(paths.root, KnownSecrets.of_study(paths))
    shown = json.dumps(view.document()) + "".join(trial.log for trial in view.trials)
    for secret in (SECRET, "hunter22", "inherited-secret"):
        assert secret not in shown
    assert "logging in with <redacted>" in shown
    assert "ValueError: no such column" in shown
    whole = read_study(paths.root).document()
    assert SECRET in json.dumps(whole)
    assert whole.keys() == view.document().keys()


def test_a_study_that_runs_shows_what_has_ended_and_what_has_not(tmp_path: Path) -> None:
    paths = study_with_failures(tmp_path, status="running", ended_at=None)
    with paths.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        view = read_study(paths.root)
    assert view.status == "running"
    assert view.headline == "Still running: 38 trials ended so far."
    assert view.running == {RUNNING: "z2-mbs16-bucket=unset-contiguous=unset"}
    assert view.best_config is None


def test_a_study_whose_driver_was_killed_is_said_to_be_interrupted(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path, status="running", ended_at=None)
    paths.lock.touch()
    assert read_study(paths.root).status == "interrupted"


@pytest.mark.parametrize("status", ["cancelled", "failed"])
def test_nothing_runs_in_a_study_that_was_ended(status: str, tmp_path: Path) -> None:
    paths = study_with_failures(tmp_path, status=status)
    assert read_study(paths.root).running == {}


@pytest.mark.parametrize("lines", [0, 1, 2, 5])
def test_a_study_that_failed_or_was_cancelled_early_shows_what_there_is(lines: int, tmp_path: Path) -> None:
    paths = recorded_study(tmp_path, status="failed", reason="The profile trial crashed.")
    only_history(paths, lines)
    view = read_study(paths.root)
    assert (view.headline, view.reason) == ("No configuration was found.", "The profile trial crashed.")
    assert (view.gain, view.best_command, view.changes, view.confirmed) == (None, "", (), ())
    change_record(paths, status="cancelled", reason="KeyboardInterrupt: ")
    assert (
        read_study(paths.root).headline
        == f"Cancelled: {len(view.trials)} trial{'s' * (len(view.trials) != 1)} ended so far."
    )


def test_markup_in_a_log_stays_text(tmp_path: Path) -> None:
    trials = {trial.number: trial for trial in read_study(study_with_failures(tmp_path).root).trials}
    assert MARKUP in trials[CRASH].log
    assert "\x1b" not in trials[CRASH].log


def test_a_study_is_found_by_path_id_and_name_and_the_newest_without_any(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path)
    for named in (str(paths.root), STUDY_ID, "programs", None):
        assert find_study(named, tmp_path) == paths.root


def test_a_name_is_a_study_s_though_a_folder_has_it_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = recorded_study(tmp_path)
    (tmp_path / "programs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_study("programs", tmp_path) == paths.root
    monkeypatch.chdir(paths.root)
    assert read_study(find_study(".", tmp_path)).study_id == STUDY_ID


@pytest.mark.parametrize("named", ["nothing", None])
def test_a_study_that_is_not_there_is_bad_input(named: str | None, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no study"):
        find_study(named, tmp_path)


def test_a_folder_that_is_no_study_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no study\.json"):
        read_study(find_study(str(tmp_path), tmp_path))


def test_a_damaged_history_is_bad_input(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path)
    paths.history.write_text('{"half": \n' + paths.history.read_text())
    with pytest.raises(InputError, match="damaged"):
        read_study(paths.root)


def test_nothing_that_is_shown_is_obeyed_by_a_terminal(tmp_path: Path) -> None:
    paths = study_with_failures(tmp_path, reason="\x1b]0;owned\x07No \x1b[31mway\x1b[0m.", name="my\x1b[2Jmodel")
    view = read_study(paths.root)
    assert view.reason == "No way."
    assert view.name == "mymodel"
    assert "\\u001b" not in json.dumps(view.document())


def test_a_history_that_is_missing_leaves_no_half_sentence(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path, finding="", gain=2.53)
    paths.history.write_text("")
    assert read_study(paths.root).headline == "2.53x faster than your configuration (one measurement, not confirmed)"
    recorded = recorded_study(tmp_path / "without", finding="", gain=None)
    recorded.history.unlink()
    said = "The study has completed. Its history is empty or missing."
    assert read_study(recorded.root).headline == said


def test_a_clock_that_was_set_back_makes_no_negative_time(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path, started_at=2000.0, ended_at=1000.0)
    assert read_study(paths.root).seconds == 0.0


def test_the_study_of_the_pictures_keeps_its_batch_and_its_report_can_be_made(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path, PICTURED)
    view = read_study(paths.root)
    assert view.headline.startswith(f"{view.gain:.2f}x faster than your configuration (95 % CI ")
    assert "train_batch_size" not in {change.setting for change in view.changes}
    assert not any("learning rate" in note for note in view.notes)
    write_report(paths)
    assert view.headline in paths.report.read_text()


REFUSED: dict[str, dict[str, Any]] = {
    "a list of stages": {"zero_optimization": {"stage": [2, 3]}},
    "offload as a text": {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}},
    "an optimizer as a text": {"optimizer": "AdamW"},
    "sections that are lists": {"optimizer": [], "zero_optimization": [{"stage": 1}], "bf16": [True]},
    "sizes as texts": {"train_micro_batch_size_per_gpu": "8", "zero_optimization": {"stage": "2"}},
    "sizes as lists": {"train_micro_batch_size_per_gpu": [1, 2], "gradient_accumulation_steps": {"a": 1}},
    "nothing of a configuration": {"zero_optimization": None, "optimizer": {"type": ["Adam"], "params": "lr"}},
}


@pytest.mark.parametrize("refused", quick_first(3, REFUSED.values()), ids=REFUSED.keys())
def test_a_study_of_a_configuration_that_deepspeed_refuses_has_its_report(
    tmp_path: Path, refused: dict[str, Any]
) -> None:
    own = json.loads((recorded_study(tmp_path / "own").record).read_text())["ds_config"]
    paths = recorded_study(tmp_path, ds_config={**own, **refused})
    for lines in (None, 2):
        if lines is not None:
            only_history(paths, lines)
        view = read_study(paths.root)
        assert json.dumps(view.document())
        print_study(view, Console(file=io.StringIO()))
        write_report(paths)
        assert paths.report.exists()


@pytest.mark.parametrize("wrong", quick_first(3, [None, "x", [["x"]], True, 1.5, [None], {"a": None}]))
@pytest.mark.parametrize("place", ["metrics", "submitted", "zero_optimization"])
def test_a_study_with_values_of_wrong_types_is_shown(place: str, wrong: Any, tmp_path: Path) -> None:
    paths = recorded_study(tmp_path)
    if place == "zero_optimization":
        lines = [json.loads(line) for line in paths.history.read_text().splitlines()]
        lines[4]["candidate"]["knobs"] = {place: wrong}
        paths.history.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    else:
        measured = json.loads(paths.best_ds_metrics.read_text())
        paths.best_ds_metrics.write_text(json.dumps({**measured, place: wrong}))
    view = read_study(paths.root)
    print_study(view, Console(file=io.StringIO()))
    assert len(view.document()["trials"]) == 35
