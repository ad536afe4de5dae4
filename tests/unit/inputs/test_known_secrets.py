"""Values that are known to be secret, in whatever spelling."""

import base64
import json
import shlex
from pathlib import Path
from urllib.parse import quote

import pytest

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets, keep_secret, known_here

PASSWORD = 'p@ss/w\'rd "ü" 1'


def test_a_value_is_hidden_in_every_spelling() -> None:
    secrets = KnownSecrets.within({"password": PASSWORD})
    spellings = [
        PASSWORD,
        quote(PASSWORD),
        quote(PASSWORD, safe=""),
        json.dumps(PASSWORD)[1:-1],
        json.dumps(PASSWORD, ensure_ascii=False)[1:-1],
        repr(PASSWORD)[1:-1],
        shlex.quote(PASSWORD)[1:-1],
        base64.b64encode(PASSWORD.encode()).decode(),
    ]
    for spelling in spellings:
        assert secrets.hide(f"said {spelling} aloud") == "said <redacted> aloud"


def test_of_an_address_the_password_is_a_secret_by_itself() -> None:
    secrets = KnownSecrets.within({"urls": ["postgres://me:hunter%2F22@host/db", "https://host:5000/x"]})
    header = base64.b64encode(b"me:hunter/22").decode()
    assert (
        secrets.hide(f"hunter%2F22 hunter/22 Basic {header} host:5000")
        == "<redacted> <redacted> Basic <redacted> host:5000"
    )


@pytest.mark.parametrize("value", ['["first-one", "second-one"]', "[first-one,second-one]", "first-one,second-one"])
def test_of_a_list_each_is_a_secret(value: str) -> None:
    for document in ({"command": ["train.py", "--token", value]}, {"entrypoint": f"train.py --token='{value}'"}):
        assert KnownSecrets.within(document).hide("second-one, then first-one") == "<redacted>, then <redacted>"


def test_every_line_of_a_key_is_hidden() -> None:
    secrets = KnownSecrets.within({"private_key": "-----BEGIN\nabcdefgh\nijklmnop\n"})
    assert secrets.hide("[rank0] ijklmnop") == "[rank0] <redacted>"


def test_user_and_password_of_the_environment_are_known_as_a_header_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter22")
    assert "hunter22" not in KnownSecrets.within().hide("hunter22")
    assert KnownSecrets.within().hide(base64.b64encode(b"me:hunter22").decode()) == "<redacted>"


def test_a_document_loses_what_a_name_gives_away_and_what_is_known_elsewhere() -> None:
    secrets = KnownSecrets.within({"api_key": "abcdef1"})
    document = {"comet": {"api_key": "x"}, "rows": [["with abcdef1", 1, None]], "abcdef1": True}
    assert secrets.hide_in(document) == {
        "comet": {"api_key": "<redacted>"},
        "rows": [["with <redacted>", 1, None]],
        "abcdef1": True,
    }


def test_a_study_s_secrets_stand_in_its_yaml_its_command_its_configuration_and_its_code(tmp_path: Path) -> None:
    from zerotune.trial_lib.records.folders import StudyPaths

    paths = StudyPaths(tmp_path)
    paths.trial(0).root.mkdir(parents=True)
    paths.experiment.write_text("environment: {environment_variables: [A_TOKEN=from-yaml]}\n")
    arguments = {"command": ["B_TOKEN=from-assignment", "train.py", "--api-key=from-flag"]}
    paths.record.write_text(json.dumps({"arguments": arguments, "ds_config": {"comet": {"api_key": "from-json"}}}))
    paths.trial(0).result.write_text(json.dumps({"program": {"ds_config": {"wandb": {"token": "from-code"}}}}))
    secrets = KnownSecrets.of_study(paths)
    for place in ("yaml", "assignment", "flag", "json", "code"):
        assert secrets.hide(f"it said from-{place}") == "it said <redacted>"
    assert KnownSecrets.of_study(StudyPaths(tmp_path / "none")).hide("from-yaml") == "from-yaml"


def test_what_this_process_learns_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerotune.trial_lib.inputs.known_secrets._OfProcess.secrets", None)
    keep_secret(KnownSecrets.within({"token": "first-one"}))
    keep_secret(KnownSecrets.within({"token": "second-one"}))
    assert known_here().hide("first-one second-one") == "<redacted> <redacted>"


def test_the_beginning_of_a_secret_at_the_end_of_a_text_that_was_cut_is_hidden() -> None:
    secrets = KnownSecrets.within({"token": "hunter-two-22"})
    for cut in ("it said hunter-tw", "it said hunter-two-2…", "it said hunter-two..."):
        assert secrets.hide(cut).startswith("it said <redacted>")
        assert "hunter" not in secrets.hide(cut)
    assert secrets.hide("the hunt") == "the hunt"
    # The beginning of a secret may be a word like another.
    words = {"best_ds_config": "the config"}
    assert KnownSecrets.within({"token": "config-38b6d5"}).hide_in(words) == words
