"""What MLflow is told and given of a study that holds secrets."""

import json
from pathlib import Path

import pytest

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.tracking.run_content import RunContent
from zerotune.trial_lib.tracking.runs import shown_copy, without_secrets

SECRET = "hunter-two-22"
SECRETS = KnownSecrets.within({"token": SECRET})


def test_no_name_tag_or_param_holds_one_and_the_run_is_still_found() -> None:
    said = f"said {SECRET}"
    tags = {"record_id": f"{SECRET}-1", "reason": said, "mlflow.note.content": said}
    content = RunContent("1", said, "FINISHED", 0.0, None, tags, {"model_dir": f"/data/{SECRET}"})
    shown = without_secrets(content, SECRETS)
    assert shown.name == "said <redacted>"
    assert shown.tags == {
        "record_id": f"{SECRET}-1",
        "reason": "said <redacted>",
        "mlflow.note.content": "said <redacted>",
    }
    assert shown.params == {"model_dir": "/data/<redacted>"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds_config.json", json.dumps({"comet": {"api_key": "short"}, "note": SECRET, "lr": 0.1})),
        ("rank_0.log", f"one\r\n{SECRET}\r\ntwo --api_key short\n"),
        (
            "report.html",
            f'<p>{SECRET}</p><pre class="own">short &lt;</pre><td class="any own" data-label="">short</td>',
        ),
        ("plan.json", json.dumps({"command": ["train.py", "--note", "short"], "why": f"`python {SECRET} short`"})),
    ],
)
def test_a_file_arrives_as_a_copy_without_any(name: str, text: str, tmp_path: Path) -> None:
    file, folder = tmp_path / name, tmp_path / "copies"
    folder.mkdir()
    file.write_text(text, newline="")
    copy = shown_copy(file, folder, SECRETS)
    assert copy.name == name
    shown = copy.read_bytes().decode()
    assert SECRET not in shown
    assert "short" not in shown
    assert "<redacted>" in shown
    assert file.read_bytes().decode() == text
    if name == "ds_config.json":
        assert json.loads(shown) == {"comet": {"api_key": "<redacted>"}, "note": "<redacted>", "lr": 0.1}
    if name.endswith(".log"):
        assert shown.count("\r\n") == 2


def test_what_a_program_has_set_before_its_imports_stays_here(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"imported": ["torch", {"SMTP_PASS": "hunter2"}, "transformers"]}))
    copy = shown_copy(file, tmp_path / "copies", SECRETS)
    assert json.loads(copy.read_text()) == {"imported": ["torch", "transformers"]}


def test_a_log_that_is_not_utf_8_keeps_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    file = tmp_path / "rank_0.log"
    file.write_bytes(b"\xff\xfe " + SECRET.encode())
    assert shown_copy(file, tmp_path / "copies", SECRETS).read_bytes() == b"\xff\xfe <redacted>"


def test_a_link_is_not_followed_to_a_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("private")
    (tmp_path / "rank0.log").symlink_to(tmp_path / "id_rsa")
    (tmp_path / "result.json").write_text("{}")
    files = [tmp_path / "rank0.log", tmp_path / "result.json"]
    content = RunContent("1", "a", "FINISHED", 0.0, None, {}, {}, artifacts=files)
    assert without_secrets(content, SECRETS).artifacts == [tmp_path / "result.json"]
