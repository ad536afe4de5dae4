"""`import zerotune`: quick, complete, and one copy of each module under both names."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zerotune
from zerotune import api, trial_lib
from zerotune.trial_lib.plan.plan_record import PlanRecord

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "deepspeed", "prefect", "mlflow"}


def printed(code: str) -> Any:
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    return json.loads(ended.stdout)


IMPORTS = """
import json, sys, zerotune
found = [[name for name in sys.modules if name[:8] == "zerotune"]]
zerotune.tune, zerotune.plan
found.append([name.partition(".")[0] for name in sys.modules])
zerotune.core
print(json.dumps([*found, [name.partition(".")[0] for name in sys.modules]]))
"""


def test_by_itself_it_is_one_module_and_it_brings_nothing_heavy() -> None:
    by_itself, with_the_commands, with_core = printed(IMPORTS)
    assert by_itself == ["zerotune"]
    assert not HEAVY & set(with_the_commands)
    assert not HEAVY - {"torch", "deepspeed"} & set(with_core)


def test_it_has_the_whole_api() -> None:
    assert {"tune", "plan", "DeepSpeedTrial", "core", "__version__"} <= set(dir(zerotune))
    assert set(trial_lib.__all__) <= set(dir(zerotune))
    assert zerotune.tune is api.tune
    with pytest.raises(AttributeError, match="module 'zerotune' has no attribute 'tun'"):
        zerotune.tun  # noqa: B018


ALIAS = """
import json, pickle, sys
import trial_lib
import trial_lib.training.context as context
from trial_lib import core, get_ds_config_from_hparams
import zerotune.trial_lib.core, zerotune.trial_lib.training.context
from zerotune.trial_lib.deepspeed_config.overrides import get_ds_config_from_hparams as home
print(json.dumps([
    trial_lib is zerotune.trial_lib,
    context is zerotune.trial_lib.training.context,
    core is zerotune.trial_lib.core,
    get_ds_config_from_hparams is home,
    context.__spec__.name == context.__name__ == 'zerotune.trial_lib.training.context',
    pickle.loads(b'ctrial_lib.training.context\\nAttrDict\\n.') is context.AttrDict,
]))
"""


def test_the_alias_gives_the_same_modules() -> None:
    assert printed(ALIAS) == [True] * 6


def test_the_alias_has_no_other_modules() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"trial_lib\.nowhere"):
        import trial_lib.nowhere  # noqa: F401


@pytest.mark.parametrize("module", ["zerotune.trial_lib.training", "trial_lib.training"])
def test_a_trial_class_is_trained_by_both_names(module: str) -> None:
    ended = subprocess.run([sys.executable, "-m", module, "none.json"], cwd=ROOT, text=True, capture_output=True)
    assert "none.json" in ended.stderr


def test_the_module_is_the_command() -> None:
    shown = subprocess.run([sys.executable, "-m", "zerotune", "--version"], cwd=ROOT, text=True, capture_output=True)
    assert shown.stdout == f"zerotune, version {zerotune.__version__}\n", shown.stderr


def test_options_are_flags() -> None:
    options = {
        "max_trials": 20,
        "free_batch": True,
        "from_earlier": False,
        "max_minutes": None,
        "random_seed": 0,
        "on": ["h100-80gb:8", "a100-40gb:8"],
        "vary": {"--compile": ["true", "false"], "WORKERS": 2},
    }
    assert list(api._flags(options)) == [
        *("--max-trials", "20", "--free-batch", "--random-seed", "0", "--on", "h100-80gb:8", "--on", "a100-40gb:8"),
        *("--vary", "--compile=true,false", "--vary", "WORKERS=2"),
    ]


def test_the_sentence_of_an_error_is_its_message() -> None:
    assert api._sentence(["note: a", "zerotune: ds.json: there is none.", ""]) == "ds.json: there is none."
    assert api._sentence(["Usage: zerotune tune", "Error: No such option: --fast"]) == "No such option: --fast"
    assert api._sentence(["Traceback:", "KeyError: 'a'"]) == "Traceback:\nKeyError: 'a'"


def test_the_typed_plan_adds_its_folder_to_the_record() -> None:
    added = set(api.Plan.model_fields) - set(PlanRecord.model_fields)
    assert added == {"version", "folder", "best_ds_config", "best_ds_config_path", "report", "tracking_uri"}
