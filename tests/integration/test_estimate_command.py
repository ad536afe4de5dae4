"""`zerotune estimate`, as it is typed: on a profile trial, on an earlier study, and on bad input."""

import json

import pytest

from tests.study_fixtures import Zerotune, run_here


@pytest.fixture
def zerotune(tmp_path, tmp_path_factory):
    return Zerotune(tmp_path, tmp_path_factory.mktemp("home"))


def estimate(zerotune, *arguments):
    return zerotune.run("estimate", str(zerotune.config), str(zerotune.model), *arguments)


@pytest.mark.long
def test_a_profile_trial_is_enough_and_leaves_nothing_behind(zerotune):
    ended = estimate(zerotune, "--json", "--max-micro-batch", "64")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert [row["label"] for row in report["rows"]] == ["z0", "z1", "z2", "z3"]
    assert report["studies"] == []
    assert "so a profile trial runs now" in ended.stderr
    assert report["micro_batch_size"] == 2
    assert all(1 <= row["largest_micro_batch"] <= 64 for row in report["rows"])
    assert all(row["total_low"] < row["total"] < row["total_high"] for row in report["rows"])
    assert not (zerotune.folder / "zerotune-studies").exists()
    assert not (zerotune.folder / "mlflow.db").exists()


@pytest.mark.long
def test_a_person_reads_a_table_and_how_sure_it_is(zerotune):
    ended = estimate(zerotune)
    assert ended.returncode == 0, ended.stderr
    for words in ("largest micro-batch", "90 % interval", "z3", "it saves nothing"):
        assert words in ended.stdout


@pytest.mark.long
def test_a_program_that_fails_is_said_in_a_sentence(zerotune):
    zerotune.write_config(program="--fail_above 0")
    ended = estimate(zerotune)
    assert ended.returncode == 1
    assert "a bug in the user's code" in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [(["--max-micro-batch", "0"], "--max-micro-batch"), (["--memory-headroom", "1.5"], "--memory-headroom")],
)
def test_bad_input_is_one_sentence(zerotune, arguments, flag):
    words = ("estimate", str(zerotune.config), str(zerotune.model), *arguments)
    ended = run_here(zerotune.folder, *words)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"zerotune: {flag}")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.long
def test_an_earlier_study_in_this_folder_is_used_instead_of_a_trial(zerotune):
    assert zerotune.run("random", "--max-trials", "4", "--json").returncode == 0
    ended = estimate(zerotune, "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["studies"] == [zerotune.study.record["study_id"]]
    assert any(row["measured"] for row in report["rows"])
    assert "profile trial" not in ended.stderr
