"""Secrets of a study, and every byte that leaves its folder: Prefect's database, MLflow's, their files, the report."""

import base64
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from study_fixtures import Zerotune

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(1200)]

# Where each stands.
SECRETS = {
    "inherited": "inherited-7f3a91",
    "assigned": "assigned-0c44e2",
    "flag": "flag+5b/90aa=",
    "joined": "joined-e7d1c8",
    "short": "s9Kq03Zx7Lm2",
    "list": "listed-a41f6b",
    "second of a list": "listed-b52e7c",
    "address": "addr-9d&8'2f",
    "header": "bearer-61ce07",
    "configuration": "config-38b6d5",
    "without a name": "unnamed-4d1e77",
}
USER = "somebody"
ADDRESS = f"https://{USER}:{quote(SECRETS['address'], safe='')}@db.example/x"
OWN = [
    f"--token={SECRETS['joined']}",
    *("--who", SECRETS["without a name"], "--api-key", SECRETS["flag"], "-k", SECRETS["short"]),
    *("--tokens", json.dumps([SECRETS["list"], SECRETS["second of a list"]])),
    *("--databases", json.dumps([ADDRESS])),
    *("--header", f"Authorization: Bearer {SECRETS['header']}"),
]
# The program says all that it knows in every way that it can.
SAYS_THEM = f"""
import base64, json, os, sys
from urllib.parse import quote
SECRETS = {list(SECRETS.values())!r}
SAID = [sys.argv, dict(os.environ), SECRETS, list(map(quote, SECRETS)),
        [base64.b64encode(one.encode()).decode() for one in SECRETS],
        base64.b64encode({f"{USER}:{SECRETS['address']}"!r}.encode()).decode()]
print(json.dumps(SAID), SAID, flush=True)
"""


def spellings(secret: str) -> Iterator[str]:
    yield from (secret, quote(secret, safe=""), json.dumps(secret)[1:-1])
    yield base64.b64encode(secret.encode()).decode().rstrip("=")


def database(file: Path) -> str:
    """Returns all that a SQLite database holds, and the bytes of its files as well: what was deleted is in those."""
    with sqlite3.connect(file) as connection:
        dump = "\n".join(connection.iterdump())
    files = [one for one in file.parent.glob(f"{file.name}*") if one.suffix != ".lock"]
    return dump + "".join(one.read_bytes().decode(errors="replace") for one in files)


def files(folder: Path) -> str:
    return "".join(file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())


def leaked(zerotune: Zerotune) -> dict[str, set[str]]:
    """Returns which secrets left the study's folder, by the way they took."""
    study = zerotune.study.paths
    ways = {
        "Prefect": database(zerotune.prefect_database),
        "Prefect's files": "".join(file.read_text() for file in zerotune.prefect_database.parent.glob("*.log")),
        "MLflow": database(zerotune.folder / "mlflow.db"),
        "MLflow's files": files(zerotune.folder / "mlartifacts"),
        "report": study.report.read_text() if study.report.exists() else "",
    }
    both = base64.b64encode(f"{USER}:{SECRETS['address']}".encode()).decode().rstrip("=")
    found = {
        way: {name for name, secret in SECRETS.items() if any(each in text for each in spellings(secret))}
        | ({"user and password"} if both in text else set())
        for way, text in ways.items()
    }
    # The report stays in the folder. What nothing gives away stands in its commands, and not in MLflow's copy.
    found["report"].discard("without a name")
    return {way: names for way, names in found.items() if names}


@pytest.fixture
def zerotune(tmp_path: Path, home: Path) -> Zerotune:
    zerotune = Zerotune(tmp_path, home)
    zerotune.folder = zerotune.model
    script = zerotune.model / "train.py"
    text = script.read_text().replace("import argparse\n", "import argparse" + SAYS_THEM, 1)
    text = text.replace(".parse_args()", ".parse_known_args()[0]")
    script.write_text(text.replace("a bug in the user's code, at", "{SAID} at"))
    configuration = json.loads((zerotune.model / "ds_config.json").read_text())
    configuration["comet"] = {"enabled": False, "api_key": SECRETS["configuration"]}
    (zerotune.model / "ds_config.json").write_text(json.dumps(configuration))
    zerotune.environment["MY_API_KEY"] = SECRETS["inherited"]
    return zerotune


def command(*own: str) -> list[str]:
    launched = ["deepspeed", "--num_gpus", "1", "train.py", "--deepspeed_config", "ds_config.json"]
    return ["--", f"HF_TOKEN={SECRETS['assigned']}", *launched, *own, *OWN]


def test_no_secret_leaves_the_folder_of_a_study_that_trains_with_its_winner(zerotune: Zerotune) -> None:
    options = ("-mt", "4", "-m", "throughput", "-z", "1", "2", "--run-full-experiment", "--json")
    ended = zerotune.run("tune", *options, *command(), timeout=900)
    assert ended.returncode == 0, ended.stderr
    study = zerotune.study
    # The program had them all, and the folder has what a resume needs.
    log = study.paths.trial(0).log(0).read_text()
    assert all(secret in log for secret in SECRETS.values())
    assert SECRETS["configuration"] in study.paths.best_ds_config.read_text()
    assert json.loads(ended.stdout)["best_ds_config"]["comet"]["api_key"] == SECRETS["configuration"]
    shown = zerotune.run("show")
    assert shown.returncode == 0, shown.stderr
    assert zerotune.run("sync", study.paths.root).returncode == 0
    assert leaked(zerotune) == {}
    # All that ZeroTune writes; what the program writes for itself is as its own umask says.
    own = [path for path in study.paths.root.rglob("*") if "scratch" not in path.parts]
    assert [path for path in own if path.lstat().st_mode & 0o077 and not path.is_symlink()] == []


def test_no_secret_leaves_the_folder_of_a_study_whose_program_fails(zerotune: Zerotune) -> None:
    ended = zerotune.run("tune", "-mt", "3", *command("--fail_above", "0"), timeout=900)
    assert ended.returncode == 1
    assert "The program raised ValueError" in ended.stderr
    # The reason quotes the program, which has said what nothing gives away.
    assert {
        way: names - {"without a name"} for way, names in leaked(zerotune).items() if names != {"without a name"}
    } == {}
