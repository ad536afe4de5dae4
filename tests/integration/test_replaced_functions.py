"""The table of what is replaced in a user's program: everything is installed in a process of its own, and compared."""

import json
import pydoc
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from zerotune.trial_lib.messages.measurement import Arrival
from zerotune.trial_lib.rank.device import CpuDevice
from zerotune.trial_lib.rank.engine_watch import EngineWatch, PipelineWatch
from zerotune.trial_lib.rank.interception import DirectSteps
from zerotune.trial_lib.rank.patching import REPLACED

OF_ENGINES = {name for row in REPLACED for name in row.names if row.why.startswith("The steps of an engine")}

INSTALL = """
import importlib, json, os, sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

scratch = Path(sys.argv[1])
os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")

from zerotune.trial_lib.messages.orders import RankOrder, SizeOrder, StepWindow, now
from zerotune.trial_lib.rank import patching, torch_functions
from zerotune.trial_lib.rank.records import RankRecords
from zerotune.trial_lib.rank.redirects import note_builds, swap_into_own_folder
from zerotune.trial_lib.rank.session import SweepSession

size = SizeOrder(
    window=StepWindow(), memory_limit=None, arguments=[], overrides={}, with_profile=True, ends_at_unbuilt_ops=True,
    turned={"engine:ddp": True},
    **{name: [str(scratch / name)] for name in ("logs", "measurements", "failures", "states", "engine_built")},
)
order = RankOrder(
    program={"script": "train.py"}, local_rank_option="", model_dir=str(scratch), scratch=str(scratch / "scratch"),
    protected_before=0.0, patience_s=1e9, device=None, launched_at=now(), sizes=(size,), withdrawal="",
)
(scratch / "scratch").mkdir()
for library in json.loads(sys.argv[2]):
    importlib.import_module(library)
records = RankRecords(order, 0)
note_builds(Path(order.scratch))
swap_into_own_folder(Path(order.scratch))
SweepSession(order, 0, records).install()
torch_functions.watch_recomputation()


def names_of(owner, name, before):
    # A function has the name of its own module too, and a method those of the classes that it is inherited from.
    if owner is os.environ:
        return ["os.environ.__class__"]
    if isinstance(owner, type):
        return [f"{each.__module__}.{each.__qualname__}.{name}" for each in owner.__mro__]
    homes = {owner.__name__, str(getattr(before, "__module__", ""))}
    return [f"{home}.{each}" for home in homes for each in (name, str(getattr(before, "__name__", name)))]


# Other modules have bound the same function.
made = {}
for each in patching._before:
    made.setdefault(id(each[2]), set()).update(names_of(*each))
made = [sorted(names) for names in made.values()]
os.write(1, f"\\n{json.dumps(made)}".encode())
os.kill(os.getpid(), 9)
"""
# What a program with everything imports, in this order.
LIBRARIES = (
    *("multiprocessing.shared_memory", "torch.distributed.checkpoint.filesystem", "torch.utils.cpp_extension"),
    *("deepspeed", "deepspeed.ops.op_builder.builder", "deepspeed.runtime.zero.partition_parameters"),
    *("accelerate.accelerator", "transformers.trainer", "transformers.hf_argparser", "transformers.modeling_utils"),
    *("transformers.tokenization_utils_base", "peft.peft_model", "safetensors.torch"),
    "lightning.pytorch.trainer.trainer",
    *("mlflow.tracking.fluent", "wandb", "torch.utils.tensorboard.writer", "tensorboardX.writer"),
    *("lightning.pytorch.cli", "pytorch_lightning.cli"),
)


@pytest.mark.long
def test_the_table_lists_what_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    there = [name for name in LIBRARIES if _is_there(name)]
    process = subprocess.run(
        [sys.executable, "-c", INSTALL, str(tmp_path), json.dumps(there)], text=True, capture_output=True
    )
    assert process.stdout, process.stderr
    made = json.loads(process.stdout.splitlines()[-1])
    listed = {name for row in REPLACED for name in row.names}
    assert [names for names in made if listed.isdisjoint(names)] == []
    absent = {name for name in listed - {name for names in made for name in names} if _is_there(name)}
    assert absent == OF_ENGINES


def test_it_lists_what_is_replaced_of_each_engine() -> None:
    def act(*args: Any, **kwargs: Any) -> None: ...

    names = ("_take_model_step", "backward", "forward", "scale", "step", "train_batch", "_next_batch")
    plain = type("DeepSpeedEngine", (), dict.fromkeys(names[:5], act))()
    pipeline = type("PipelineEngine", (), {**dict.fromkeys(names, act), "_INSTRUCTION_MAP": {}})()
    plain.module = pipeline.module = torch.nn.Linear(1, 1)
    before = {name for engine in (plain, pipeline) for name in vars(engine)}
    backward = torch.Tensor.backward
    watches = [
        kind(engine, CpuDevice(), 1, None, False, Arrival())
        for kind, engine in ((EngineWatch, plain), (PipelineWatch, pipeline))
    ]
    DirectSteps().watch(plain)
    replaced = {f"{type(engine).__name__}.{name}" for engine in (plain, pipeline) for name in vars(engine)}
    assert torch.Tensor.backward is not backward
    for watch in reversed(watches[:1]):
        watch.end()
    listed = {name.rpartition(".engine.")[2] for name in OF_ENGINES} - {"torch.Tensor.backward"}
    assert {name for name in replaced if name.partition(".")[2] not in before} == listed


def _is_there(name: str) -> bool:
    """Whether the installed version of a library has a module, a class or a function."""
    try:
        return find_spec(name) is not None
    except ImportError:
        pass
    owner, _, attribute = name.rpartition(".")
    try:
        return bool(owner) and pydoc.locate(owner) is not None and hasattr(pydoc.locate(owner), attribute)
    except pydoc.ErrorDuringImport:
        return False


WITHOUT_OTHERS = """
import sys
from importlib import metadata

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, Blocked())
import zerotune.trial_lib.launch.processes.supervisor, zerotune.trial_lib.launch.processes.fork_server
import zerotune.trial_lib.rank.rank, zerotune.trial_lib.rank.session
"""


def test_a_rank_needs_nothing_that_the_user_s_environment_may_lack() -> None:
    others = "prefect mlflow click rich transformers accelerate lightning peft safetensors optuna jinja2 yaml ray"
    code = WITHOUT_OTHERS.format(names=set(others.split()))
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
