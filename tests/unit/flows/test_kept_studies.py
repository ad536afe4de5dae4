"""`zerotune list`, `compare`, `export`, `share` and `rm`: the studies of a folder."""

import io
import json
import shutil
import zipfile
from pathlib import Path

import pytest
from report_fixtures import STUDY_ID, recorded_study

from zerotune.flows.records import compare_command, export_command, list_command, remove_command, share_command
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.study.folder import hold_lock

SECOND = "another-study"


@pytest.fixture
def studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two studies, of which the second has another gain."""
    monkeypatch.chdir(tmp_path)
    paths = recorded_study(tmp_path)
    other = StudyPaths(paths.root.parent / SECOND)
    shutil.copytree(paths.root, other.root)
    record = json.loads(other.record.read_text())
    other.record.write_text(json.dumps({**record, "study_id": SECOND, "gain": 1.25, "gain_interval": [1.2, 1.3]}))
    return paths.root.parent


def test_a_list_has_every_study_with_its_answer(studies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_command(as_json=True) == 0
    listed = json.loads(capsys.readouterr().out)["studies"]
    assert {each["study_id"] for each in listed} == {STUDY_ID, SECOND}
    (studies / SECOND / "study.json").write_text("{")
    assert list_command(as_json=False) == 0
    shown = capsys.readouterr()
    assert STUDY_ID in shown.out
    assert "left out" in shown.err


def test_a_gain_that_was_measured_once_is_listed_as_that(studies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = studies / SECOND / "study.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "status": "cancelled", "gain_interval": None}))
    assert list_command(as_json=False) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(SECOND)]
    assert "1.25x, not confirmed" in line


def test_two_studies_show_what_differs_and_no_more(studies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_command(STUDY_ID, SECOND, as_json=True) == 0
    first, second = json.loads(capsys.readouterr().out)["answers"]
    assert second["gain"] == "1.25x (1.20 to 1.30)"
    assert first["gain"] != second["gain"]
    # Versions and settings are alike.
    assert not [name for name in first if "DeepSpeed" in name]
    assert compare_command(STUDY_ID, SECOND, as_json=False) == 0
    assert "not measured in turn" in " ".join(capsys.readouterr().out.split())


def test_an_archive_has_the_answer_without_logs_and_secrets(studies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "zq-93kd02mdkw9")
    config = studies / STUDY_ID / "best_ds_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "note": "zq-93kd02mdkw9"}))
    archive = Path("answer.zip")
    assert export_command(STUDY_ID, archive) == 0
    with zipfile.ZipFile(io.BytesIO(archive.read_bytes())) as read:
        names = read.namelist()
        whole = b"".join(map(read.read, names))
        assert json.loads(read.read("study.json"))["study"] == STUDY_ID
    assert {"study.json", "report.html", "best_ds_config.json"} <= set(names)
    assert not [name for name in names if name.endswith(".log")]
    assert b"zq-93kd02mdkw9" not in whole
    # An archive is never overwritten.
    with pytest.raises(InputError, match="cannot be written"):
        export_command(STUDY_ID, archive)


def test_a_shared_answer_has_a_product_and_numbers_and_one_of_a_processor_is_refused(
    studies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="no row of the table"):
        share_command(STUDY_ID)
    paths = StudyPaths(studies / SECOND)
    lines = [json.loads(line) for line in paths.history.read_text().splitlines()]
    best = json.loads(paths.record.read_text())["best_number"]
    metrics = {"throughput": 40.0, "tokens_per_second": 80_000.0, "FLOPS_per_gpu": 1.56e14, "mfu": 0.5}
    for result in (line["result"] for line in lines if "tell" in line):
        if result["profile"] is not None:
            result["profile"] |= {"num_params": 10**9, "trainable_num_params": 10**9}
        if result["number"] == best:
            result["metrics"] = metrics
            result["devices"] = [{"device": "GPU-secret", "model": "NVIDIA A100-SXM4-80GB"}]
            result["memory"]["peak"] = [1, 1]
    paths.history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert share_command(SECOND) == 0
    assert capsys.readouterr().out == "zerotune share,,1000000000,3900000000,2000,A100,2,80000\n"


def test_a_study_is_removed_unless_a_process_drives_it_or_nobody_agrees(studies: Path) -> None:
    with pytest.raises(InputError, match="nobody can be asked"):
        remove_command([STUDY_ID], is_sure=False)
    lock = hold_lock(StudyPaths(studies / STUDY_ID).lock, "study")
    with pytest.raises(InputError, match="another process drives this study"):
        remove_command([STUDY_ID], is_sure=True)
    lock.release()
    # The first name that is wrong keeps all.
    with pytest.raises(InputError, match="no study has this"):
        remove_command([SECOND, "nothing"], is_sure=True)
    assert remove_command([STUDY_ID], is_sure=True) == 0
    assert [path.name for path in studies.iterdir()] == [SECOND]
