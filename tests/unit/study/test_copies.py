"""A copy of a study's folder is a study of its own; a folder that was moved is the same study."""

import os
import shutil
from pathlib import Path

import pytest

from zerotune.trial_lib.records.folders import (
    FullExperimentRecord,
    StudyPaths,
    StudyRecord,
    Whereabouts,
    whereabouts_of,
)
from zerotune.trial_lib.study import folder
from zerotune.trial_lib.study.folder import begun_by, read_record, with_own_id, write_record


@pytest.fixture
def original(tmp_path: Path) -> StudyPaths:
    paths = StudyPaths(tmp_path / "zerotune-studies" / "s-1")
    paths.root.mkdir(parents=True)
    record = StudyRecord(study_id="s-1", name="s", method="asha", metric="throughput", flow_run_id="run-1")
    write_record(paths, record.model_copy(update={"whereabouts": whereabouts_of(paths.root)}))
    return paths


def id_of(paths: StudyPaths, resumes: bool = True) -> str:
    return with_own_id(read_record(paths), paths.record, resumes)[0].study_id


def copied(paths: StudyPaths, to: Path) -> StudyPaths:
    shutil.copytree(paths.root, to)
    return StudyPaths(to)


@pytest.mark.parametrize("resumes", [True, False])
def test_a_copy_beside_its_original_is_another_study_and_the_original_is_the_same(
    original: StudyPaths, resumes: bool
) -> None:
    beside = copied(original, original.root.with_name("again"))
    record, note = with_own_id(read_record(beside), beside.record, resumes)
    assert record.study_id.startswith("s-1-")
    assert record.flow_run_id is None
    assert record.whereabouts == whereabouts_of(beside.root)
    assert "copy of s-1" in note
    assert str(original.root) in note
    assert with_own_id(read_record(original), original.record, resumes) == (read_record(original), "")


def test_each_copy_has_an_id_of_its_own_and_the_same_each_time_that_it_is_made(original: StudyPaths) -> None:
    first, second = (copied(original, original.root.with_name(name)) for name in ("a", "b"))
    assert len({id_of(original), id_of(first), id_of(second)}) == 3
    before = id_of(first)
    shutil.rmtree(first.root)
    assert id_of(copied(original, first.root)) == before


def test_a_copy_that_is_told_apart_stays_what_it_is_when_it_is_moved(original: StudyPaths) -> None:
    beside = copied(original, original.root.with_name("a"))
    record, _ = with_own_id(read_record(beside), beside.record, resumes=True)
    write_record(beside, record)
    moved = StudyPaths(beside.root.rename(original.root.with_name("c")))
    assert with_own_id(read_record(moved), moved.record, resumes=True) == (record, "")


def test_a_folder_that_is_moved_is_the_same_study_even_where_a_copy_takes_its_place(original: StudyPaths) -> None:
    before = original.root
    moved = StudyPaths(before.rename(before.with_name("moved")))
    assert id_of(moved) == "s-1"
    copied(moved, before)
    assert id_of(moved) == "s-1"


def test_a_folder_that_was_copied_away_and_removed_is_the_same_study(original: StudyPaths, tmp_path: Path) -> None:
    elsewhere = copied(original, tmp_path / "another-file-system")
    shutil.rmtree(original.root)
    assert id_of(elsewhere) == "s-1"


def test_a_link_to_the_folder_and_a_folder_that_was_restored_in_its_place_are_the_same_study(
    original: StudyPaths, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(original.root)
    assert id_of(StudyPaths(tmp_path / "link")) == "s-1"
    backup = copied(original, tmp_path / "backup")
    shutil.rmtree(original.root)
    assert id_of(copied(backup, original.root)) == "s-1"


def test_on_another_host_a_shared_folder_is_the_same_study_and_a_copy_is_one_once_it_is_resumed(
    original: StudyPaths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("zerotune.trial_lib.records.folders.platform.node", lambda: "elsewhere")
    assert id_of(original) == "s-1"
    arrived = copied(original, tmp_path / "arrived")
    shutil.rmtree(original.root)
    assert id_of(arrived, resumes=False) == "s-1"
    assert id_of(arrived, resumes=True) != "s-1"


def test_a_copy_of_what_another_user_has_is_a_copy(original: StudyPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = copied(original, original.root.with_name("mine"))

    def refused(*_: object, **__: object) -> bool:
        raise PermissionError

    monkeypatch.setattr(folder.Path, "samefile", refused)
    assert id_of(beside) != "s-1"


def test_a_copy_with_the_original_s_number_on_another_file_system_is_a_copy(
    original: StudyPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = copied(original, original.root.with_name("a"))
    number = original.root.stat().st_ino
    monkeypatch.setattr(
        folder, "whereabouts_of", lambda root: Whereabouts(host=os.uname().nodename, path=str(root), inode=number)
    )
    assert id_of(beside) != "s-1"


def test_a_study_of_an_older_version_is_what_it_says(original: StudyPaths) -> None:
    write_record(original, read_record(original).model_copy(update={"whereabouts": None}))
    assert id_of(copied(original, original.root.with_name("a"))) == "s-1"


def test_a_full_experiment_is_told_from_its_copy_as_well(tmp_path: Path) -> None:
    root = tmp_path / "e-1"
    root.mkdir()
    record = FullExperimentRecord(experiment_id="e-1", name="e", whereabouts=whereabouts_of(root))
    (root / "record.json").write_text(record.model_dump_json(indent=2))
    shutil.copytree(root, tmp_path / "e-2")
    assert with_own_id(record, root / "record.json", resumes=True)[0].experiment_id == "e-1"
    own, note = with_own_id(record, tmp_path / "e-2" / "record.json", resumes=True)
    assert own.experiment_id.startswith("e-1-")
    assert note


def test_a_flow_run_that_is_retried_resumes_the_original(original: StudyPaths) -> None:
    beside = copied(original, original.root.with_name("a"))
    assert begun_by("run-1", [beside.record, original.record]) == original.root
