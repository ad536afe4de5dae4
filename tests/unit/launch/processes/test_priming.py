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
        "another": "import adapters",
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


def test_what_has_run_in_part_is_named_and_is_not_begun_without_it(installed: list[str]) -> None:
    begun = import_all(["adapters", "adapters.layers", "trainer", "beside"], {"starts_thread"})
    assert begun == {"adapters", "trainer"}
    del installed[:]
    assert import_all(["adapters", "adapters.layers", "trainer"], {"starts_thread", *begun}) == set()
    assert installed == []


def test_an_error_that_an_importer_has_handled_is_no_reason_to_leave_it_out(
    installed: list[str], tmp_path: Path
) -> None:
    (tmp_path / "fast_kernels.py").write_text("raise ImportError('no compiler')")
    (tmp_path / "layers.py").write_text("try:\n    import fast_kernels\nexcept ImportError:\n    pass\nimport adapters")
    assert import_all(["layers"], {"starts_thread"}) == {"adapters", "layers"}


def test_a_package_that_fails_is_begun_once_however_many_modules_need_it(installed: list[str]) -> None:
    import_all(["adapters", "adapters.layers", "trainer", "another", "beside"], {"starts_thread"})
    assert installed == ["adapters", "adapters.layers", "adapters.layers.tuned", "trainer", "another", "beside"]


def test_a_server_of_foreseen_runs_leaves_out_what_asks_for_a_device(installed: list[str], tmp_path: Path) -> None:
    """A framework asks while it is imported and keeps the answer. Who only takes the function is imported."""
    ask = "import torch, functools\n@functools.cache\ndef gpus():\n    return torch.cuda.device_count()\n"
    beside = "import begun, asks\nbegun.modules.append('framework')\n"
    (tmp_path / "asks.py").write_text(ask)
    (tmp_path / "framework.py").write_text(f"{beside}GPUS = asks.gpus()")
    (tmp_path / "takes.py").write_text("from torch.cuda import device_count\nimport torch")
    assert import_all(["framework", "takes"], set(), is_foreseeing=True) == {"framework"}
    assert "framework" not in sys.modules
    assert importlib.import_module("takes").device_count() == importlib.import_module("framework").GPUS
    assert importlib.import_module("asks").gpus.cache_info().misses == 2
    assert importlib.import_module("torch").cuda.device_count.__module__ == "torch.cuda"
    assert installed.count("framework") == 2
