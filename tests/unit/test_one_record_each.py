"""Who adds a search method or a metric writes one record, and finds it wherever people choose and read."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITH_TOYS = """
from trial_lib.records import search_metrics
from trial_lib.search import methods
from trial_lib.search.settings import RandomSettings

tokens = search_metrics.Metric("tokens_per_second", "tokens/s")
search_metrics.SEARCH_METRICS[tokens.name] = tokens
toy = methods.Method("toy", "Draws as random does.", "toy_search:ToySearch", RandomSettings)
methods.METHODS[toy.name] = toy
"""
FORM = """
from trial_lib.study.arguments import StudyArguments

fields = StudyArguments.model_json_schema()["properties"]
assert "toy" in fields["method"]["enum"], fields["method"]
assert "tokens_per_second" in fields["metric"]["enum"], fields["metric"]
told = StudyArguments(command=("python", "train.py"), model_dir="/", method="toy", metric="tokens_per_second")
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
from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.report.leaderboard import leaderboard

def ended(number, tokens):
    return TrialResult(
        trial_id=f"s-{number}", number=number, purpose=Purpose.SEARCH, config_hash="0" * 16,
        outcome=Outcome.COMPLETED, metrics={"tokens_per_second": tokens, "throughput": 1.0},
    )

results = {number: ended(number, tokens) for number, tokens in ((1, 10.0), (2, 30.0), (3, 20.0))}
candidates = {number: Candidate(micro_batch_size=number, slots=1, data_parallel_size=1) for number in results}
rows = leaderboard(results, candidates, "tokens_per_second")
assert [(row.trial, row.value) for row in rows] == [(2, 30.0), (3, 20.0), (1, 10.0)], rows
"""


def run(code: str) -> None:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "unit", ROOT / "tests" / "unit" / "replay")))
    script = [sys.executable, "-c", WITH_TOYS + code]
    ran = subprocess.run(script, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def shown(*words: str) -> str:
    code = f"import sys\nfrom flows.command_line import run\nsys.argv = {['zerotune', *words]!r}\nrun()"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "unit")))
    script = [sys.executable, "-c", WITH_TOYS + code]
    ran = subprocess.run(script, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    return ran.stdout + ran.stderr


def test_the_command_line_offers_them() -> None:
    assert "Draws as random does." in shown("toy", "--help")
    tune = " ".join(shown("tune", "--help").split())
    assert "|toy]" in tune
    assert "tokens_per_second in tokens/s" in tune


def test_prefects_form_offers_them() -> None:
    run(FORM)


def test_a_replay_compares_the_method() -> None:
    run(REPLAY)


def test_the_report_ranks_by_the_metric() -> None:
    run(REPORT)
