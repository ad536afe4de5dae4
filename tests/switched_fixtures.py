"""What the tests of switches share: a program that has some, and what its ranks had of them."""

import json
import re
import shutil
from pathlib import Path

from study_fixtures import Study, Zerotune

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.result import Outcome

SWITCHED = Path(__file__).parent / "programs" / "switched"
COMMAND = ("deepspeed", "--num_gpus", "1", "train.py", "--deepspeed_config", "ds_config.json")
SHOWN = re.compile(r"twice (\w+) kernel (\w+) loops (\w+) layers (\w+) own (\w+) threads (\d+)")
PLACES = ("--twice", "--kernel", "train.yaml:model.loops", "model.layers", "OWN", "OMP_NUM_THREADS")
DEFAULTS = dict(zip(PLACES, ("False", "relu", "1", "1", "None", "1"), strict=True))


def switched(folder: Path, home: Path) -> Zerotune:
    """Returns the command in a folder that has the program with switches."""
    found = Zerotune(folder, home)
    shutil.copytree(SWITCHED, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    found.environment["OMP_NUM_THREADS"] = "1"
    return found


def switched_with(server: PrefectServer, store: Path, folder: Path, home: Path) -> Zerotune:
    """Returns the same with a server of Prefect's that runs already, and a copy of an empty MLflow store."""
    found = switched(folder, home)
    shutil.copy(store, folder / "mlflow.db")
    found.environment["PREFECT_API_URL"] = server.api_url
    return found


def ran_with(study: Study, typed: dict[str, str]) -> list[dict[str, str]]:
    """Returns what the ranks of each trial had, after a look whether it is what their candidate says."""
    found = []
    for number, result in study.results.items():
        if result.outcome not in (Outcome.COMPLETED, Outcome.TOO_SLOW):
            continue
        shown = SHOWN.search(Path(result.logs[0]).read_text())
        assert shown is not None
        had = dict(zip(PLACES, shown.groups(), strict=True))
        candidate = json.loads(study.paths.trial(number).candidate.read_text())
        asked = {
            place: str(value) for place, value in candidate["knobs"].get("program", {}).items() if value is not None
        }
        assert had == {**DEFAULTS, **typed, **asked}
        found.append(had)
    return found
