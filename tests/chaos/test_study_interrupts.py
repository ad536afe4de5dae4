"""Studies that are interrupted: nothing of them is left running, and `resume` continues where they were."""

import shutil
import signal
import time
from pathlib import Path

import pytest
from study_fixtures import Study, Zerotune, words_of

from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.study.history import Asked, AskedSweep, Told, Withdrawn

pytestmark = pytest.mark.alone

SEARCH = ("binary", "-mt", "4", "-z", "1", "-mct", "1")
# Long enough to be caught in the middle of it.
SLOW = "--largest_micro_batch 300 --num_steps 100 --step_seconds 0.1"


@pytest.fixture
def zerotune(tmp_path: Path, home: Path) -> Zerotune:
    return Zerotune(tmp_path, home, program=SLOW)


def trial_is_training(zerotune: Zerotune, number: int) -> bool:
    """Whether the trial's rank has entered the user's program."""
    log = zerotune.study.paths.trial(number).log(0)
    return log.exists() and "pid " in log.read_text()


def a_sweep_is_training(zerotune: Zerotune) -> bool:
    if not studies_exist(zerotune):
        return False
    study = zerotune.study
    ended = set(study.results)
    swept = [number for event in study.history if isinstance(event, AskedSweep) for number, _ in event.numbered]
    return any(number not in ended and trial_is_training(zerotune, number) for number in swept)


def studies_exist(zerotune: Zerotune) -> bool:
    folder = zerotune.folder / "zerotune-studies"
    return folder.is_dir() and any((study / "study.json").exists() for study in folder.iterdir())


def finish_fast(zerotune: Zerotune) -> None:
    """Has what is left of the study run without the sleep."""
    script = zerotune.model / "train.py"
    script.write_text(script.read_text().replace("time.sleep(args.step_seconds)", "pass"))


def assert_each_trial_was_told_once(study: Study) -> None:
    numbers = [told.number for told in study.told]
    assert sorted(numbers) == sorted({asked.number for asked in study.asked})
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("interrupt", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_an_interrupt_while_the_servers_come_up_ends_everything_and_says_how_to_resume(
    zerotune: Zerotune, interrupt: signal.Signals
) -> None:
    command = zerotune.start(*SEARCH)
    command.wait_until(lambda: studies_exist(zerotune) and len(command.look()) >= 4, "the servers' processes")
    command.process.send_signal(interrupt)
    ended = command.end(timeout=15)
    assert ended.returncode == 130, ended.stderr
    assert f"zerotune resume {zerotune.study.paths.root}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert command.left_over(2) == []
    assert zerotune.study.record["status"] == "cancelled"


@pytest.mark.long
def test_two_interrupts_during_a_trial_end_the_command_at_once_and_the_study_can_be_finished(
    zerotune: Zerotune,
) -> None:
    command = zerotune.start(*SEARCH)
    command.wait_until(lambda: studies_exist(zerotune) and trial_is_training(zerotune, 3), "trial 3")
    finished = zerotune.study.result_times()
    assert set(finished) == {0, 1, 2}
    command.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    command.process.send_signal(signal.SIGINT)
    ended = command.end(timeout=5)
    assert ended.returncode == 130, ended.stderr
    assert f"zerotune resume {zerotune.study.paths.root}" in ended.stderr
    assert command.left_over(2) == []
    study = zerotune.study
    assert [event.number for event in study.asked] == [0, 1, 2, 3]
    assert [event.number for event in study.told] == [0, 1, 2]

    finish_fast(zerotune)
    resumed = zerotune.run("resume", study.paths.root)
    assert resumed.returncode == 0, resumed.stderr
    assert "Some records have not reached MLflow" not in resumed.stderr
    said = "changed since the study began: train.py (edited). Its earlier trials"
    assert said in study.paths.log.read_text()
    assert f"note: {said}" in resumed.stderr
    times = study.result_times()
    assert {number: times[number] for number in finished} == finished
    assert study.searched == [0, 1, 2, 3, 4]
    assert_each_trial_was_told_once(study)
    assert study.record["status"] == "completed"


@pytest.mark.long
def test_sigterm_during_a_trial_ends_it_in_good_order(zerotune: Zerotune) -> None:
    command = zerotune.start(*SEARCH)
    command.wait_until(lambda: studies_exist(zerotune) and trial_is_training(zerotune, 2), "trial 2")
    command.process.send_signal(signal.SIGTERM)
    ended = command.end(timeout=20)
    assert ended.returncode == 130, ended.stderr
    assert f"zerotune resume {zerotune.study.paths.root}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert command.left_over(2) == []
    study = zerotune.study
    assert study.record["status"] == "cancelled"
    assert [event.number for event in study.told] == [0, 1]


@pytest.mark.long
def test_sigkill_leaves_no_process_and_only_one_command_at_a_time_resumes_the_study(zerotune: Zerotune) -> None:
    command = zerotune.start(*SEARCH)
    command.wait_until(lambda: studies_exist(zerotune) and trial_is_training(zerotune, 2), "trial 2")
    assert any("own_server.py" in " ".join(words_of(process)) for process in command.look())
    finished = zerotune.study.result_times()
    command.process.kill()
    command.process.wait()
    assert command.left_over(2) == []

    study = zerotune.study
    with study.paths.history.open("a") as history:
        history.write('{"tell": 2, "resu')
    finish_fast(zerotune)
    first = zerotune.start("resume", study.paths.root)
    first.wait_until(lambda: "study:" in first.said, "the first resume")
    second = zerotune.run("resume", study.paths.root)
    assert second.returncode == 2
    assert second.stderr.strip() == (
        f"zerotune: {study.paths.root}: another process drives this study. Wait for it, or stop it first."
    )
    ended = first.end()
    assert ended.returncode == 0, ended.stderr
    times = study.result_times()
    assert {number: times[number] for number in finished} == finished
    assert_each_trial_was_told_once(study)
    assert study.told[2].number == 2


@pytest.mark.long
def test_a_resumed_search_asks_what_the_uninterrupted_one_asked(tmp_path: Path, home: Path) -> None:
    whole = Zerotune(tmp_path, home, program="--largest_micro_batch 300")
    # One at a time: the order in which trials that run at once end is not the search's to decide.
    assert whole.run("binary", "-mt", "6", "-z", "1", "2", "-mct", "1").returncode == 0
    before = whole.study

    # As an interruption in the middle would have left it: trial 4 in flight, the later ones not decided on.
    root = before.paths.root.with_name("cut")
    shutil.copytree(before.paths.root, root)
    cut = Study(root)
    lines = cut.paths.history.read_text().splitlines(keepends=True)
    last = max(place for place, event in enumerate(cut.history) if isinstance(event, Asked) and event.number == 4)
    cut.paths.history.write_text("".join(lines[: last + 1]))
    for number in range(4, 1 + max(before.results)):
        shutil.rmtree(cut.paths.trial(number).root)
    record = cut.paths.record.read_text().replace('"completed"', '"running"')
    cut.paths.record.write_text(record.replace(before.record["study_id"], "cut"))

    resumed = whole.run("resume", root)
    assert resumed.returncode == 0, resumed.stderr
    assert [told.number for told in cut.told][:7] == cut.searched == before.searched == list(range(7))
    assert [asked.candidate for asked in cut.asked[:7]] == [asked.candidate for asked in before.asked[:7]]
    assert sum(asked.purpose is Purpose.SEARCH for asked in cut.asked) == 5


@pytest.mark.long
@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGKILL])
def test_a_study_that_is_interrupted_during_a_sweep_keeps_what_it_measured_and_is_resumed(
    zerotune: Zerotune, interrupt: signal.Signals
) -> None:
    command = zerotune.start("adaptive", "--free-batch", "-mt", "6", "-mct", "1")
    command.wait_until(lambda: a_sweep_is_training(zerotune), "a sweep", timeout_s=120)
    finished = zerotune.study.result_times()
    command.process.send_signal(interrupt)
    ended = command.end(timeout=20)
    assert command.left_over(2) == []
    if interrupt is signal.SIGINT:
        assert ended.returncode == 130, ended.stderr
        assert f"zerotune resume {zerotune.study.paths.root}" in ended.stderr
        assert "Traceback" not in ended.stderr

    finish_fast(zerotune)
    study = zerotune.study
    resumed = zerotune.run("resume", study.paths.root)
    assert resumed.returncode == 0, resumed.stderr
    times = study.result_times()
    assert {number: times[number] for number in finished} == finished
    swept = [number for event in study.history if isinstance(event, AskedSweep) for number, _ in event.numbered]
    decided = sorted([*swept, *(asked.number for asked in study.asked)])
    ended_or_not = sorted(event.number for event in study.history if isinstance(event, Told | Withdrawn))
    assert ended_or_not == decided
    assert study.record["status"] == "completed"
