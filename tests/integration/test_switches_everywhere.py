"""Switches of the program wherever a study works: every method, nightly runs of a deployment, a recorded table."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from study_fixtures import Study, Zerotune
from switched_fixtures import COMMAND, SHOWN, ran_with, switched, switched_with
from worker_fixtures import process_worker

from benchmarks.replay.recorded import read_table
from benchmarks.replay.table import TableWorld
from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.records.switches import switches_of

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def zerotune(tmp_path: Path, home: Path, server: PrefectServer, empty_store: Path) -> Zerotune:
    return switched_with(server, empty_store, tmp_path, home)


@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_every_method_varies_coarse_and_fine_switches_and_its_answer_can_be_typed(
    zerotune: Zerotune, method: str
) -> None:
    vary = ("--vary", "--twice=true,false", "--vary", "OWN=a,b")
    options = ("--json", "--method", method, "-z", "1", "--max-trials", "6", "--max-micro-batch", "4")
    ended = zerotune.run("tune", *options, *vary, "--", *COMMAND, "--twice", timeout=800)
    assert ended.returncode == 0, ended.stderr
    study = zerotune.study
    had = ran_with(study, {"--twice": "True"})
    assert len({(each["--twice"], each["OWN"]) for each in had}) > 1
    best = study.results[study.record["best_number"]]
    expected = SHOWN.search(Path(best.logs[0]).read_text())
    assert expected is not None
    plain = subprocess.run(
        ["sh", study.paths.best_command], cwd=zerotune.folder, env=zerotune.environment, capture_output=True, text=True
    )
    assert expected[0] in plain.stdout, plain.stderr[-2000:]


def test_nightly_runs_of_a_deployment_vary_switches_and_the_second_begins_with_the_known_winner(
    zerotune: Zerotune, home: Path, server: PrefectServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    places = {"--twice": [True, False], "OWN": [None, "a"]}
    parameters = {
        "config_path": None,
        "command": [*COMMAND, "--twice"],
        "model_dir": str(zerotune.folder),
        "vary": places,
        "zero_stages": [1],
        "max_micro_batch": 4,
        "metric": "throughput",
        "from_earlier": True,
    }
    nights: list[Study] = []
    with process_worker(tmp_path_factory.mktemp("worker"), home, server.api_url, "nights") as worker:
        for _ in range(2):
            run = worker.run(zerotune, method="adaptive", max_trials=4, **parameters)
            state = worker.api.wait_for_state(run, "COMPLETED", "FAILED", "CRASHED", timeout_s=420)
            assert state["type"] == "COMPLETED", state["message"]
            (root,) = set((zerotune.folder / "zerotune-studies").iterdir()) - {night.paths.root for night in nights}
            nights.append(Study(root))
    first, second = nights
    for night in nights:
        ran_with(night, {"--twice": "True"})
        assert night.record["switches"] == {"--twice": True, "OWN": None}
        best = json.loads(night.paths.trial(night.record["best_number"]).candidate.read_text())
        assert best["knobs"]["program"]["--twice"] is False
        assert "no --twice" in night.record["finding"]
        assert not re.search(r"--twice\b", night.paths.best_command.read_text())
    (learned,) = json.loads(second.paths.earlier_studies.read_text())
    assert learned["study_id"] == first.paths.root.name
    # Nothing has changed, so the second night confirms what it knows, with its switches, and searches no more.
    known = next(asked.candidate for asked in first.asked if asked.number == first.record["best_number"])
    assert known.knobs["program"]["--twice"] is False
    assert Purpose.SEARCH in {asked.purpose for asked in first.asked}
    assert Purpose.SEARCH not in {asked.purpose for asked in second.asked}
    assert known in [asked.candidate for asked in second.asked if asked.purpose is Purpose.CONFIRM]
    client = MlflowClient(tracking_uri=f"sqlite:///{zerotune.folder}/mlflow.db")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    varied = {run.data.params["program.--twice"] for run in runs if "program.--twice" in run.data.params}
    assert varied == {"true", "false"}


def test_a_recorded_grid_has_the_switches_and_the_replay_reads_it(tmp_path: Path, home: Path) -> None:
    zerotune = switched(tmp_path, home)
    zerotune.config.write_text(
        "name: switched\n"
        f"entrypoint: {' '.join(COMMAND)} --twice\n"
        "hyperparameters: {deepspeed_config: ds_config.json}\n"
        "resources: {slots_per_trial: 1}\n"
        "search_space:\n"
        "  zero_optimization.reduce_bucket_size: 100000\n"
        "  zero_optimization.contiguous_gradients: true\n"
        "  program:\n"
        "    --twice: [true, false]\n"
        "    --kernel: [relu, gelu]\n"
        "    OWN: [null, a]\n"
    )
    ended = zerotune.record(tmp_path, "-z", "1", "-b", "2", "--repeats", "1")
    assert ended.returncode == 0, ended.stderr
    table = read_table(tmp_path / "table.jsonl")
    rows = [row for of_candidate in table.rows.values() for row in of_candidate]
    assert {row.outcome for row in rows} == {Outcome.COMPLETED}
    switches = [switches_of(row.candidate.knobs) for row in rows]
    assert {(each["--twice"], each["--kernel"], each["OWN"]) for each in switches} == {
        (twice, kernel, own) for twice in (True, False) for kernel in ("relu", "gelu") for own in (None, "a")
    }
    world = TableWorld(table)
    assert world.problem.space.coarse_switches == {"--twice", "--kernel"}
    assert switches_of(world.submitted.knobs) == {"--twice": True, "--kernel": "relu", "OWN": None}
    fastest = max(rows, key=lambda row: row.metrics["throughput"])
    assert world.truth(fastest.candidate) is not None
