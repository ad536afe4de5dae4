"""Nights of one experiment: the first finds a winner, the second is slower, the third confirms it and ends early."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from study_fixtures import Study, Zerotune, query

from zerotune.trial_lib.records.candidate import Purpose

if TYPE_CHECKING:
    from zerotune.flows.prefect_server import PrefectServer

pytestmark = [pytest.mark.alone, pytest.mark.long]

# A step costs what it costs, so larger batches win by far.
COMMAND = ("adaptive", "--from-earlier", "-mt", "3", "--free-batch", "--max-micro-batch", "8", "-m", "throughput")
# Many times a step's own processor time, which a busy machine does not take away.
WORK = """until = time.process_time() + 0.04
        while time.process_time() < until:
            pass"""


@dataclass(frozen=True)
class Night:
    """One scheduled run."""

    ended: subprocess.CompletedProcess[str]
    study: Study

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.ended.stdout)
        return document

    @property
    def purposes(self) -> list[Purpose]:
        return [result.purpose for result in self.study.results.values()]


class Nights:
    """An experiment that is tuned night after night against one Prefect server and one MLflow store."""

    def __init__(self, folder: Path, home: Path, server: "PrefectServer") -> None:
        self.zerotune = Zerotune(folder, home)
        self.zerotune.environment["PREFECT_API_URL"] = server.api_url
        self._seen: set[Path] = set()
        self.last: Night | None = None

    def tune(self) -> Night:
        """Runs the command that a schedule runs."""
        ended = self.zerotune.run(*COMMAND, "--json")
        (root,) = set((self.zerotune.folder / "zerotune-studies").iterdir()) - self._seen
        self._seen.add(root)
        self.last = Night(ended, Study(root))
        return self.last

    def edit(self) -> None:
        """Somebody edits the code: each step computes something more."""
        script = self.zerotune.model / "train.py"
        script.write_text(script.read_text().replace("time.sleep(args.step_seconds)", WORK))

    def prefect(self, sql: str, *values: str) -> list[tuple[Any, ...]]:
        """Returns rows of Prefect's database."""
        return query(self.zerotune.prefect_database, sql, *values)

    def parent(self, night: Night) -> Run:
        """The night's parent run in MLflow."""
        (run,) = self.runs(f"tags.record_id = '{night.study.paths.root.name}'")
        return run

    def runs(self, wanted: str) -> list[Run]:
        """The runs of the experiment in MLflow that a filter finds."""
        client = MlflowClient(tracking_uri=f"sqlite:///{self.zerotune.folder}/mlflow.db")
        experiment = client.get_experiment_by_name("tiny")
        assert experiment is not None
        return list(client.search_runs([experiment.experiment_id], wanted))


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory, home: Path, server: "PrefectServer") -> Nights:
    return Nights(tmp_path_factory.mktemp("nights"), home, server)


@pytest.fixture(scope="module")
def first(nights: Nights) -> Night:
    return nights.tune()


@pytest.fixture(scope="module")
def slower(nights: Nights, first: Night) -> Night:
    """The night after the edit."""
    nights.edit()
    return nights.tune()


@pytest.fixture(scope="module")
def quiet(nights: Nights, slower: Night) -> Night:
    """The night after that, with nothing changed."""
    return nights.tune()


def test_the_first_night_searches_and_keeps_what_the_experiment_was(first: Night) -> None:
    assert first.ended.returncode == 0, first.ended.stderr
    assert "No earlier study of this experiment can be learned from." in first.ended.stderr
    assert Purpose.SEARCH in first.purposes
    assert first.document["since_last"] is None
    fingerprint = json.loads(first.study.paths.fingerprint.read_text())
    assert set(fingerprint["code"]) == {"train.py", "ds_config.json", "deepspeed.yaml"}
    assert fingerprint["hardware"]["processor"]


def test_edited_code_is_searched_again_from_the_known_winner_on(first: Night, slower: Night) -> None:
    assert "Changed since: train.py (edited)." in slower.ended.stderr
    known = first.document["confirmation"]["winner"]["number"]
    (begun,) = [asked for asked in first.study.asked if asked.number == known]
    searched = next(asked for asked in slower.study.asked if asked.purpose is Purpose.SEARCH)
    assert searched.candidate == begun.candidate


def test_a_slower_winner_has_an_exit_code_of_its_own_and_is_said_with_both_numbers(first: Night, slower: Night) -> None:
    assert slower.ended.returncode == 4, slower.ended.stderr
    compared = slower.document["since_last"]
    assert compared["is_regression"]
    assert compared["ratio"]["high"] < 1
    assert compared["throughput"] < 0.6 * compared["last_throughput"]
    assert compared["last_throughput"] == pytest.approx(first.document["best"]["throughput"])
    assert compared["changes"] == ["train.py (edited)"]
    assert slower.study.record["regression"] == compared["sentence"]
    assert compared["sentence"] in slower.study.paths.log.read_text()
    assert f"below the last known {compared['last_throughput']:.4g} samples/s" in compared["sentence"]
    assert compared["sentence"].endswith("Changed between them: train.py (edited).")


def test_prefect_has_an_event_of_it_and_the_run_a_name_for_it(nights: Nights, first: Night, slower: Night) -> None:
    rows = nights.prefect("select resource_id, payload, related from events where event = 'zerotune.regression'")
    # Prefect's database is that of other tests' studies too.
    ((resource, payload, related),) = [row for row in rows if slower.document["study"] in row[1]]
    assert resource == "zerotune.experiment.tiny"
    compared = slower.document["since_last"]
    told = json.loads(payload)
    assert told["study_id"] == slower.document["study"]
    assert told["last_study_id"] == first.document["study"]
    assert told == {"study_id": slower.document["study"], "folder": slower.document["folder"], **compared}
    assert {one["prefect.resource.role"] for one in json.loads(related)} >= {"flow", "flow-run"}
    states = "select state_type, state_name from flow_run where name = ?"
    assert nights.prefect(states, slower.document["study"]) == [("COMPLETED", "Regressed")]
    assert nights.prefect(states, first.document["study"]) == [("COMPLETED", "Completed")]


def test_mlflow_has_a_tag_of_it_which_finds_that_night_alone(nights: Nights, first: Night, slower: Night) -> None:
    assert nights.parent(slower).data.tags["regression"] == slower.document["since_last"]["sentence"]
    assert "regression" not in nights.parent(first).data.tags
    found = nights.runs("tags.regression LIKE '%below%'")
    assert [run.info.run_id for run in found] == [nights.parent(slower).info.run_id]


def test_a_night_on_which_nothing_has_changed_confirms_the_known_winner_and_does_not_search(
    slower: Night, quiet: Night
) -> None:
    assert quiet.ended.returncode == 0, quiet.ended.stderr
    assert f"Nothing has changed since {slower.study.paths.root.name}" in quiet.ended.stderr
    assert set(quiet.purposes[1:]) == {Purpose.CONFIRM}
    assert quiet.purposes[0] is Purpose.PROFILE
    assert len(quiet.purposes) < len(slower.purposes)
    (stopped,) = quiet.study.stopped
    assert stopped.reason == "nothing has changed, and the known winner holds"
    assert json.loads(quiet.study.paths.best_ds_config.read_text()) == json.loads(
        slower.study.paths.best_ds_config.read_text()
    )
    assert quiet.document["confirmation"]["winner"]["verdict"] == "faster"
    assert not quiet.document["since_last"]["is_regression"]
    assert quiet.document["since_last"]["last_study_id"] == slower.study.paths.root.name


def on_another_processor(last: Study) -> str:
    """Makes a study one of another machine; returns what has changed since."""
    fingerprint = json.loads(last.paths.fingerprint.read_text())
    now = fingerprint["hardware"]["processor"]
    fingerprint["hardware"]["processor"] = "Another processor"
    last.paths.fingerprint.write_text(json.dumps(fingerprint))
    return f"processor Another processor -> {now}"


def with_an_older_torch(last: Study) -> str:
    """Makes a study one of another torch; returns what has changed since."""
    now = last.results[0].versions["torch"]
    history = last.paths.history.read_text()
    last.paths.history.write_text(history.replace(f'"torch": "{now}"', '"torch": "2.4.0"'))
    return f"torch 2.4.0 -> {now}"


@pytest.mark.parametrize("make_other", [with_an_older_torch, on_another_processor])
def test_other_versions_or_other_hardware_are_searched_again_from_the_known_winner_on(
    nights: Nights, quiet: Night, make_other: Callable[[Study], str]
) -> None:
    last = nights.last
    assert last is not None
    changed = make_other(last.study)
    night = nights.tune()
    assert night.study.record["status"] == "completed", night.ended.stderr
    assert f"Changed since: {changed}." in night.ended.stderr
    known = last.document["confirmation"]["winner"]["number"]
    (begun,) = [asked for asked in last.study.asked if asked.number == known]
    searched = next(asked for asked in night.study.asked if asked.purpose is Purpose.SEARCH)
    assert searched.candidate == begun.candidate
    assert night.document["since_last"]["changes"] == [changed]
