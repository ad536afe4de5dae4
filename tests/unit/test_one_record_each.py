"""A search method, a metric or a launcher is one record. It is found wherever people choose and read."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITH_TOYS = """
from zerotune.trial_lib.inputs.launchers import followed, left_out
from zerotune.trial_lib.inputs.launchers import LAUNCHERS, UserLauncher
from zerotune.trial_lib.records import result as search_metrics
from zerotune.trial_lib.search import methods
from zerotune.trial_lib.search.methods import RandomSettings

tokens = search_metrics.Metric("toys_per_second", "toys/s")
search_metrics.SEARCH_METRICS[tokens.name] = tokens
toy = methods.Method("toy", "Draws as random does.", "toy_search:ToySearch", RandomSettings)
methods.METHODS[toy.name] = toy
LAUNCHERS["toyrun"] = UserLauncher(
    name="toyrun",
    programs=("toyrun go",),
    options={"--copies": followed(), "-c": followed("--copies"), "--colour": left_out("ranks have no colour")},
    count=("--copies",),
    runs_command=True,
    rank_variables={"TOY_RANK": "{rank}", "TOY_SIZE": "{ranks}"},
)
"""
FORM = """
from zerotune.trial_lib.study.arguments import StudyArguments

fields = StudyArguments.model_json_schema()["properties"]
assert "toy" in fields["method"]["enum"], fields["method"]
assert "toys_per_second" in fields["metric"]["enum"], fields["metric"]
told = StudyArguments(command=("python", "train.py"), model_dir="/", method="toy", metric="toys_per_second")
assert told.zero_stages == toy.stages
"""
REPLAY = """
from small_table import small_table
from benchmarks.replay.driver import simulate
from benchmarks.replay.methods import METHODS, create
from benchmarks.replay.table import TableWorld

assert "toy" in METHODS
world = TableWorld(small_table())
search = create("toy", world, seed=1, max_trials=6)
simulate(search, world, 1, 1)
assert search.best is not None
"""
REPORT = """
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.report.study_view import leaderboard

def ended(number, tokens):
    return TrialResult(
        trial_id=f"s-{number}", number=number, purpose=Purpose.SEARCH, config_hash="0" * 16,
        outcome=Outcome.COMPLETED, metrics={"toys_per_second": tokens, "throughput": 1.0},
    )

results = {number: ended(number, tokens) for number, tokens in ((1, 10.0), (2, 30.0), (3, 20.0))}
candidates = {number: Candidate(micro_batch_size=number, slots=1, data_parallel_size=1) for number in results}
rows = leaderboard(results, candidates, "toys_per_second")
assert [(row.trial, row.value) for row in rows] == [(2, 30.0), (3, 20.0), (1, 10.0)], rows
"""
TYPED = """
import os
import sys
from pathlib import Path

from zerotune.trial_lib.inputs.launchers import launcher_in
from zerotune.trial_lib.inputs.program_code import may_start_ranks
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.launch.rank_starter import rank_requests
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.program import program_of
from zerotune.trial_lib.study.program import KnownProgram
from zerotune.trial_lib.study.typed_command import read_command
from zerotune.trial_lib.study.setup import StudySetup
from zerotune.trial_lib.study.training_command import training_command
from zerotune.trial_lib.messages.errors import InputError

folder, host = Path.cwd(), Host("cpu", ["0", "1"], 2**30)
Path("train.py").touch()
typed = "toyrun go --colour red -c 2 python train.py --lr 0.1 --deepspeed_config ds.json"
Path("ds.json").write_text("{}")
experiment = read_command(typed.split(), {}, folder, host)
entrypoint = experiment.entrypoint
assert (entrypoint.launched_by, entrypoint.slots, entrypoint.script) == ("toyrun", 2, "train.py"), entrypoint
assert "--colour red is left out: ranks have no colour." in entrypoint.notes

program = program_of(experiment, {}, folder / "trial.json", {}, folder / "spec.json")
_, last = rank_requests(program, host, ["0", "1"], 2900, [folder / "0", folder / "1"])
assert (last.environment["TOY_RANK"], last.environment["TOY_SIZE"]) == ("1", "2")
assert "LOCAL_SIZE" not in last.environment

paths, arguments = StudyPaths(folder / "study"), StudyArguments(command=typed.split(), model_dir=folder)
setup = StudySetup("s", 0.0, experiment, arguments, paths, host, {})
command = training_command(setup, KnownProgram.of(experiment), {})
again = f"toyrun go --colour red -c 2 python train.py --lr 0.1 --deepspeed_config {paths.best_ds_config}"
assert command.splitlines()[-1] == again, command

assert launcher_in(["/opt/toyrun", "go", "-c", "2", "x.py"]) == ["/opt/toyrun", "go", "-c", "2", "x.py"]
assert launcher_in(["toyrun", "stop"]) is None
Path("launch.py").write_text("import subprocess\\nsubprocess.run(['toyrun', 'go', 'x.py'])")
assert may_start_ranks(folder / "launch.py", [folder])

def refused(words):
    try:
        read_command(words.split(), {}, folder, host)
    except InputError as error:
        return str(error), error.remedy
    raise AssertionError(words)

assert "toyrun go" in refused("bash run.sh")[1]
assert "toyrun starts a training by `toyrun go`" in refused("toyrun train.py")[0]
assert "toyrun is not told how many ranks" in refused("toyrun go python train.py")[0]
assert "the option --colr of the launcher toyrun" in refused("toyrun go --colr red python train.py")[0]
"""


def run(code: str, folder: Path = ROOT) -> None:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "unit", ROOT / "tests" / "unit" / "replay")))
    script = [sys.executable, "-c", WITH_TOYS + code]
    ran = subprocess.run(script, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def shown(*words: str) -> str:
    code = f"import sys\nfrom zerotune.flows.command_line import run\nsys.argv = {['zerotune', *words]!r}\nrun()"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "unit")))
    script = [sys.executable, "-c", WITH_TOYS + code]
    ran = subprocess.run(script, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    return ran.stdout + ran.stderr


def test_the_command_line_offers_them() -> None:
    assert "Draws as random does." in shown("toy", "--help")
    tune = " ".join(shown("tune", "--help").split())
    assert "|toy]" in tune
    assert "toys_per_second in toys/s" in tune
    assert "toyrun go" in tune


def test_prefects_form_offers_them() -> None:
    run(FORM)


def test_a_launcher_is_read_and_typed_again(tmp_path: Path) -> None:
    run(TYPED, tmp_path)


def test_a_replay_compares_the_method() -> None:
    run(REPLAY)


def test_the_report_ranks_by_the_metric() -> None:
    run(REPORT)
