"""What a program has imported, and set before, is found so that a fork server can import it ahead."""

import importlib
import os
import site
import sys
from pathlib import Path

import pytest

from zerotune.trial_lib.launch.processes.fork_server import import_all
from zerotune.trial_lib.messages.measurement import Import
from zerotune.trial_lib.rank.records import ImportedModules

LIBRARY = "import os\nPLACE = os.environ.get('LIBRARY_PLACE')\n"
MODULES = {"first_library": "installed", "second_library": "installed", "own_module": "own"}


@pytest.fixture
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImportedModules:
    """Of a program that has two libraries installed, and a module of its own."""
    for name, folder in MODULES.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.py").write_text(LIBRARY)
        # It is removed after the test as well.
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "installed")])
    monkeypatch.setattr(sys, "path", [*(str(tmp_path / folder) for folder in ("own", "installed")), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv("LIBRARY_OLD", "1")
    monkeypatch.delenv("LIBRARY_PLACE", raising=False)
    return ImportedModules()


def of_libraries(imports: ImportedModules) -> list[Import]:
    """Returns what was found of the two libraries."""
    found = imports.found()
    return [each for each in found if isinstance(each, dict) or each in MODULES]


def test_a_variable_stands_before_the_first_library_that_may_read_it(
    imports: ImportedModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports.follow()
    importlib.import_module("first_library")
    monkeypatch.setenv("LIBRARY_PLACE", "here")
    monkeypatch.delenv("LIBRARY_OLD")
    importlib.import_module("second_library")
    assert of_libraries(imports) == [
        "first_library",
        {"LIBRARY_OLD": None, "LIBRARY_PLACE": "here"},
        "second_library",
    ]


def test_a_module_of_the_program_is_left_out_and_what_was_set_before_it_is_not(
    imports: ImportedModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports.follow()
    monkeypatch.setenv("LIBRARY_PLACE", "here")
    importlib.import_module("own_module")
    importlib.import_module("first_library")
    assert of_libraries(imports) == [{"LIBRARY_PLACE": "here"}, "first_library"]


def test_a_module_of_a_package_may_read_what_is_set_after_the_package(
    imports: ImportedModules, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "installed" / "first_package"
    package.mkdir()
    for name in ("__init__", "late"):
        (package / f"{name}.py").write_text(LIBRARY)
    imports.follow()
    importlib.import_module("first_package")
    monkeypatch.setenv("LIBRARY_PLACE", "here")
    importlib.import_module("first_package.late")
    found = imports.found()
    for name in ("first_package", "first_package.late"):
        monkeypatch.delitem(sys.modules, name)
    assert found[-3:] == ["first_package", {"LIBRARY_PLACE": "here"}, "first_package.late"]


def test_a_secret_is_not_kept(imports: ImportedModules, monkeypatch: pytest.MonkeyPatch) -> None:
    imports.follow()
    monkeypatch.setenv("LIBRARY_TOKEN", "abc")
    monkeypatch.setenv("LIBRARY_NO_TEXT", os.fsdecode(b"\xff"))
    importlib.import_module("first_library")
    assert of_libraries(imports) == ["first_library"]


def test_a_variable_that_no_later_import_can_read_is_not_kept(
    imports: ImportedModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports.follow()
    importlib.import_module("first_library")
    monkeypatch.setenv("LIBRARY_PLACE", "here")
    assert of_libraries(imports) == ["first_library"]


def test_the_fork_server_imports_with_the_variables_and_keeps_its_own(
    imports: ImportedModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process has threads, which a fork server has not.
    monkeypatch.setattr("zerotune.trial_lib.launch.processes.fork_server.doubt", lambda: None)
    before = dict(os.environ)
    import_all(["first_library", {"LIBRARY_PLACE": "here", "LIBRARY_OLD": None}, "second_library"], set())
    assert sys.modules["first_library"].PLACE is None
    assert sys.modules["second_library"].PLACE == "here"
    assert dict(os.environ) == before
