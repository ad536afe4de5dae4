"""What the fork server imports ahead for ranks. A name that is wrong would only make each rank slower."""

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from zerotune.trial_lib.launch.processes.fork_server import _OF_RANKS, import_all
from zerotune.trial_lib.launch.trial import ENTRY


@pytest.mark.parametrize("module", _OF_RANKS)
def test_what_is_imported_for_the_ranks_exists(module: str) -> None:
    assert find_spec(module) is not None


def test_the_entry_of_the_ranks_is_among_it() -> None:
    assert ENTRY.partition(":")[0] in _OF_RANKS


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A package `adapters` needs a module `starts_thread`, and `trainer` needs the package.

    Yields:
        The modules that have begun, in their order.
    """
    texts = {
        "begun": "modules = []",
        "starts_thread": "",
        "adapters/__init__": "from . import layers\nfrom .layers import tuned\nimport starts_thread",
        "adapters/layers/__init__": "from .tuned import LAYER",
        "adapters/layers/tuned": "LAYER = object()",
        "trainer": "import adapters",
        "beside": "import json",
    }
    for name, text in texts.items():
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text if name == "begun" else f"import begun\nbegun.modules.append(__name__)\n{text}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    # This process has threads, which a fork server has not.
    monkeypatch.setattr("zerotune.trial_lib.launch.processes.fork_server.doubt", lambda: None)
    before = set(sys.modules)
    yield importlib.import_module("begun").modules
    for name in sys.modules.keys() - before:
        del sys.modules[name]


def test_a_rank_imports_a_package_that_the_server_could_not_as_for_the_first_time(installed: list[str]) -> None:
    import_all(["adapters", "adapters.layers", "beside"], {"starts_thread"})
    assert "beside" in sys.modules
    assert not [name for name in sys.modules if name.startswith("adapters")]
    adapters = importlib.import_module("adapters")
    assert adapters.layers.tuned.LAYER is adapters.layers.LAYER
    assert installed.count("adapters.layers") == 2


def test_a_package_that_fails_is_begun_once_however_many_modules_need_it(installed: list[str]) -> None:
    import_all(["adapters", "adapters.layers", "adapters.layers.tuned", "trainer", "beside"], {"starts_thread"})
    assert installed == ["adapters", "adapters.layers", "adapters.layers.tuned", "trainer", "beside"]


def test_a_server_of_foreseen_runs_leaves_out_what_asks_for_a_device(installed: list[str], tmp_path: Path) -> None:
    """A framework asks while it is imported and keeps the answer. Who only takes the function is imported."""
    ask = "import torch, functools\n@functools.cache\ndef has_gpu():\n    return torch.cuda.is_available()\n"
    beside = "import begun, asks\nbegun.modules.append('framework')\n"
    (tmp_path / "asks.py").write_text(ask)
    (tmp_path / "framework.py").write_text(f"{beside}GPU = asks.has_gpu()")
    (tmp_path / "takes.py").write_text("from torch.cuda import is_available\nimport torch")
    import_all(["framework", "takes"], set(), is_foreseeing=True)
    assert "framework" not in sys.modules
    assert importlib.import_module("takes").is_available() == importlib.import_module("framework").GPU
    assert importlib.import_module("asks").has_gpu.cache_info().misses == 2
    assert importlib.import_module("torch").cuda.is_available.__module__ == "torch.cuda"
    assert installed.count("framework") == 2
