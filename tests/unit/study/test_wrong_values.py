"""Every field of a study's records with values that ZeroTune never writes: a sentence, and no traceback."""

import io
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from case_fixtures import quick_only
from report_fixtures import recorded_study
from rich.console import Console
from wrong_values import WRONG, Place, changed, places

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.report.html_report import write_report
from zerotune.trial_lib.report.read_study import read_study
from zerotune.trial_lib.report.tables import print_study
from zerotune.trial_lib.study.open_study import resume_study

LINES = (
    "ask",
    "tell",
    "submitted",
    "told",
    "searched",
    "found",
    "sweep",
    "swept",
    "withdraw",
    "stop",
    "confirm",
    "end",
)
# Results as those of the first and of the last trial.
RESULTS_AS_WELL = ("told", "found", "swept")
ANSWER = ("best_ds_metrics", "best_ds_config")
REPORTS = 2


def short_study(folder: Path, lines: int = len(LINES)) -> StudyPaths:
    """Returns a study whose history has a line of each kind, or the first ones of these."""
    paths = recorded_study(folder)
    recorded = [json.loads(line) for line in paths.history.read_text().splitlines()]
    asked, told = recorded[4:6]
    stop = next(line for line in recorded if "stop" in line)
    confirmed = next(line for line in recorded if line.get("purpose") == "confirm")
    ended = next(line for line in recorded if line.get("tell") == confirmed["ask"])
    sizes = [{**asked["candidate"], "micro_batch_size": size} for size in (8, 16)]
    sweep = {"sweep": 3, "candidates": sizes, "bytes_per_sample": 1e6, "headroom": 0.1}
    swept = {"tell": 3, "result": {**told["result"], "number": 3}}
    again, its_end = {**confirmed, "ask": 5}, {"tell": 5, "result": {**ended["result"], "number": 5}}
    whole = [*recorded[:6], sweep, swept, {"withdraw": 4, "reason": "memory"}, stop, again, its_end]
    write_lines(paths, whole[:lines])
    return paths


def write_lines(paths: StudyPaths, lines: list[Any]) -> None:
    paths.history.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def look(paths: StudyPaths) -> None:
    view = read_study(paths.root)
    print_study(view, Console(file=io.StringIO()))
    json.dumps(view.document())


def every_field(paths: StudyPaths, document: Any, write: Callable[[Any], object]) -> None:
    """Shows the study with each wrong value at each place, and draws its report with all that were accepted."""
    errors: dict[str, str] = {}
    accepted: dict[Place, list[Any]] = {}

    def attempt(read: Callable[[StudyPaths], object], what: str) -> bool:
        try:
            read(paths)
        except InputError:
            return False
        except Exception as error:  # noqa: BLE001 - what no reader may raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            errors.setdefault(f"{Path(last.filename).name}:{last.lineno}: {type(error).__name__}: {error}"[:120], what)
        return True

    for at in places(document):
        for wrong in WRONG:
            write(changed(document, at, wrong))
            if attempt(look, f"{at} = {str(wrong)[:20]!r}"):
                accepted.setdefault(at, []).append(wrong)
    leaves = {
        at: values
        for at, values in accepted.items()
        if not any(at == other[: len(at)] for other in accepted if other != at)
    }
    for report in range(REPORTS):
        whole = document
        for at, values in leaves.items():
            whole = changed(whole, at, values[report % len(values)])
        write(whole)
        attempt(write_report, f"report {report}")
    assert errors == {}


@pytest.mark.parametrize("kind", quick_only([line for line in LINES if line not in RESULTS_AS_WELL], LINES))
def test_a_history_with_a_wrong_value_is_shown_or_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    paths, line = short_study(tmp_path), LINES.index(kind)
    look(paths)
    lines = [json.loads(text) for text in paths.history.read_text().splitlines()]
    every_field(paths, lines[line], lambda wrong: write_lines(paths, [*lines[:line], wrong, *lines[line + 1 :]]))


@pytest.mark.parametrize("name", ["study", *ANSWER])
def test_a_record_with_a_wrong_value_is_shown_or_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    paths = short_study(tmp_path, lines=2)
    file = paths.root / f"{name}.json"
    every_field(paths, json.loads(file.read_text()), lambda wrong: file.write_text(json.dumps(wrong)))


def test_a_study_with_a_wrong_value_in_its_record_is_not_resumed(tmp_path: Path) -> None:
    paths = short_study(tmp_path, lines=2)
    record = {**json.loads(paths.record.read_text()), "status": "cancelled"}
    for at in places(record):
        for wrong in WRONG:
            paths.record.write_text(json.dumps(changed(record, at, wrong)))
            with pytest.raises(InputError):
                resume_study(paths.root)
