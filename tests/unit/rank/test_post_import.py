import importlib
import sys

import pytest

from zerotune.trial_lib.rank.patching import when_imported


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose name no other test has imported."""
    name = f"late_{tmp_path.name}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "inner.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_module_that_is_imported_already_is_handed_over_at_once():
    seen = []
    when_imported("json", seen.append)
    assert seen == [sys.modules["json"]]


def test_a_module_is_handed_over_complete_and_once_when_it_is_imported(package):
    seen = []
    when_imported(f"{package}.inner", lambda module: seen.append(module.VALUE))
    importlib.import_module(package)
    assert seen == []
    module = importlib.import_module(f"{package}.inner")
    importlib.reload(module)
    assert seen == [1]


def test_several_may_wait_for_one_module_and_the_first_may_change_it(package):
    seen = []
    when_imported(f"{package}.inner", lambda module: setattr(module, "VALUE", 2))
    when_imported(f"{package}.inner", lambda module: seen.append(module.VALUE))
    importlib.import_module(f"{package}.inner")
    assert seen == [2]


def test_a_module_keeps_its_own_loader(package):
    when_imported(f"{package}.inner", lambda module: None)
    module = importlib.import_module(f"{package}.inner")
    # Another library of this process may have put a loader of its own in the place of Python's.
    assert type(module.__loader__) is type(importlib.import_module(package).__loader__)
    assert "exec_module" not in vars(module.__loader__)
    assert "VALUE" in module.__loader__.get_source(f"{package}.inner")


def test_a_failed_import_stays_the_programs_and_is_waited_for_again(package, tmp_path):
    seen = []
    file = tmp_path / package / "inner.py"
    file.write_text("raise RuntimeError('not yet')\n")
    when_imported(f"{package}.inner", seen.append)
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module(f"{package}.inner")
    file.write_text("VALUE = 'now, and longer'\n")
    importlib.invalidate_caches()
    importlib.import_module(f"{package}.inner")
    assert len(seen) == 1


def test_a_module_that_does_not_exist_does_not_exist(package):
    when_imported(f"{package}.missing", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="missing"):
        importlib.import_module(f"{package}.missing")
