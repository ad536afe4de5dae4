"""Every setting that the installed DeepSpeed reads is known: tuned, kept as typed, or refused (docs/settings.md)."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerotune.trial_lib.deepspeed_config.overrides import without_tuning_keys
from zerotune.trial_lib.inputs.search_space import read_search_space
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.search.catalogue import KNOBS, catalogues_name
from zerotune.trial_lib.search.knobs import STAGE

DOCS = Path(__file__).parents[3] / "docs" / "settings.md"

# The sections of the classes that pydantic fills. None is no part of a training's configuration.
_CLASSES = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "ZenFlowConfig": "zero_optimization.zenflow",
    "DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedFP16Config": "fp16",
    "TPTrainingConfig": "tensor_parallel",
    "TPConfig": "tensor_parallel.tp",
    "CompileConfig": "compile",
    "CommsLoggerConfig": "comms_logger",
    "TensorBoardConfig": "tensorboard",
    "WandbConfig": "wandb",
    "CSVConfig": "csv_monitor",
    "CometConfig": "comet",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
    "HybridEngineConfig": "hybrid_engine",
    "WeightQuantConfig": "weight_quantization",
    "DeepSpeedMonitorConfig": None,
}
# The sections of the dictionaries that code reads by key, by their names in its files.
_READ = {
    "runtime/config.py": {
        "param_dict": "",
        "self._param_dict": "",
        "config": "",
        "data_types_params": "data_types",
        "checkpoint_params": "checkpoint",
        "par_write_params": "checkpoint.parallel_write",
        "param_dict[OPTIMIZER]": "optimizer",
        "param_dict[SCHEDULER]": "scheduler",
        "param_dict[TORCH_AUTOCAST]": "torch_autocast",
    },
    "runtime/precision_config.py": {"param_dict": ""},
    "runtime/zero/config.py": {"param_dict": ""},
    "runtime/tensor_parallel/config.py": {"ds_config": ""},
    "runtime/activation_checkpointing/config.py": {
        "param_dict": "",
        "act_chkpt_config_dict": "activation_checkpointing",
    },
    "runtime/swap_tensor/aio_config.py": {"param_dict": "", "aio_dict": "aio"},
    "runtime/data_pipeline/config.py": {"param_dict": "data_efficiency"},
    "runtime/model_checkpointing/config.py": {
        "param_dict": "checkpoint",
        "checkpoint_dict": "checkpoint",
        "writer_dict": "checkpoint.writer",
    },
    "module_inject/auto_ep_config.py": {"param_dict": "expert_parallel"},
    "profiling/config.py": {"param_dict": "", "flops_profiler_dict": "flops_profiler"},
    "autotuning/config.py": {"param_dict": "autotuning", "autotuning_dict": "autotuning"},
    "datastates/config.py": {"param_dict": ""},
    "comm/config.py": {"ds_config": ""},
    "utils/config.py": {"param_dict": "", "param_dict[TIMERS]": "timers"},
    "runtime/pipe/engine.py": {"self._config.pipeline": "pipeline"},
}
# Files that read whole sections for the classes above.
_BY_CLASS = ("runtime/config_utils.py", "monitor/config.py")
# Folders of DeepSpeed that no training's configuration reaches.
_APART = ("inference", "linear", "ops")


def _package() -> Path:
    found = importlib.util.find_spec("deepspeed")
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def _constants(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Returns the texts that DeepSpeed's modules give to names."""
    found: dict[str, set[str]] = {}
    for tree in trees.values():
        for each in tree.body:
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant):
                for target in each.targets:
                    if isinstance(target, ast.Name) and isinstance(each.value.value, str):
                        found.setdefault(target.id, set()).add(each.value.value)
    return found


def _reads(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yields each reading of a dictionary by a key, as (dictionary, key)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("get_scalar_param", "get_communication_data_type") and len(node.args) > 1:
                yield ast.unparse(node.args[0]), node.args[1]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "get" and node.args:
                yield ast.unparse(node.func.value), node.args[0]
        elif isinstance(node, ast.Subscript):
            yield ast.unparse(node.value), node.slice
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            yield ast.unparse(node.comparators[0]).removesuffix(".keys()"), node.left
        elif isinstance(node, ast.keyword) and node.arg == "comm_type":
            yield "param_dict", node.value
        elif isinstance(node, ast.FunctionDef) and node.name == "get_communication_data_type":
            yield "param_dict", node.args.defaults[0]


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yields the names of a class's settings, by its fields and their aliases."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
            if isinstance(each.value, ast.Call):
                aliases = (word.value for word in each.value.keywords if word.arg == "alias")
                yield from (alias.value for alias in aliases if isinstance(alias, ast.Constant))


def settings_of_deepspeed() -> set[str]:
    """Returns the dotted paths of all settings that the installed DeepSpeed reads from a configuration."""
    package = _package()
    files = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in _APART]
    texts = {str(path.relative_to(package)): path.read_text() for path in files}
    # Only these have a class or a reading that is looked for. To parse the others takes seconds.
    trees = {
        name: ast.parse(text)
        for name, text in texts.items()
        if name in _READ or name.endswith(("constants.py", "config.py")) or "DeepSpeedConfigModel" in text
    }
    constants = _constants({name: tree for name, tree in trees.items() if name.endswith(("constants.py", "config.py"))})
    found: set[str] = set()
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and "DeepSpeedConfigModel" in map(ast.unparse, node.bases):
                assert node.name in _CLASSES or node.name == "MyExampleConfig", f"{name}: which section is {node.name}?"
                section = _CLASSES.get(node.name)
                found |= set() if section is None else {f"{section}.{field}" for field in _fields(node)}
        if name.endswith("config.py") and name not in _READ:
            asked = any(dictionary == "param_dict" for dictionary, _ in _reads(tree))
            assert not asked or name in _BY_CLASS, f"{name}: which section does it read?"
        for dictionary, key in _reads(tree) if name in _READ else ():
            section = _READ[name].get(dictionary)
            if section is None:
                continue
            names = {key.value} if isinstance(key, ast.Constant) else constants.get(ast.unparse(key), set())
            words = {each for each in names if isinstance(each, str) and re.fullmatch(r"[a-z]\w+", each)}
            found |= {f"{section}.{each}".lstrip(".") for each in words}
    return found


def table() -> dict[str, list[str]]:
    """Returns the patterns of the documented table, by its first column."""
    text = DOCS.read_text().partition("## Every setting\n")[2].partition("\n#")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ") and "`" in line]
    found: dict[str, list[str]] = {}
    for first, names, *_ in rows:
        found.setdefault(first.strip(), []).extend(re.findall(r"`([^`]+)`", names))
    return found


def _is_in(path: str, patterns: list[str]) -> bool:
    return any(path == each or (each.endswith(".*") and path.startswith(each[:-1])) for each in patterns)


def test_every_setting_of_the_installed_deepspeed_is_tuned_kept_or_refused() -> None:
    listed = table()
    assert listed.keys() == {"kept", "refused"}
    settings = settings_of_deepspeed()
    assert len(settings) > 200
    assert {"zero_optimization.overlap_comm", "aio.block_size", "expert_parallel.top_k", "train_batch_size"} <= settings
    sections = {path.rpartition(".")[0] for path in settings}
    named = {path for path in settings if path not in sections}
    tuned = {*KNOBS, STAGE}
    patterns = [*tuned, *listed["kept"], *listed["refused"]]
    assert sorted(path for path in named if not _is_in(catalogues_name(path), patterns)) == []
    both = [path for path in tuned for patterns in listed.values() if path in patterns]
    assert both == []
    # What DeepSpeed no longer reads is not said of it.
    gone = [each for each in listed["kept"] if not any(_is_in(path, [each]) for path in settings)]
    assert gone == []


def test_a_kept_setting_may_be_asked_for_and_a_refused_one_may_not() -> None:
    listed = {what: [each for each in names if not each.endswith(".*")] for what, names in table().items()}
    for path in listed["kept"]:
        assert read_search_space({path: [1, 2]})[0].path == catalogues_name(path)
    for path in listed["refused"]:
        with pytest.raises(InputError):
            read_search_space({path: [1, 2]})
    assert without_tuning_keys({"autotuning": {"enabled": True}}) == {}
