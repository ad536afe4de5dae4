"""The rules of the house that no single module shows."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "tasks", "trial_lib")
MAX_LINES = 450
MAX_FILES_AT_A_ROOMS_ROOT = 22
MAX_SHARE_OF_A_ROOM = 1 / 8


def test_imports_run_one_way() -> None:
    linter = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, text=True, capture_output=True
    )
    assert linter.returncode == 0, linter.stdout + linter.stderr


def test_no_two_modules_need_each_other() -> None:
    """Not by an import inside a function either, nor by one that only a type checker sees."""
    graph = grimp.build_graph(*PACKAGES)
    needs = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(needs).prepare()


@pytest.mark.parametrize("module", ["flows.command_line", "flows.commands.tuning"])
def test_the_command_line_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    imported = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    assert not {"torch", "deepspeed", "prefect", "mlflow"} & set(imported.stdout.split())


def test_no_file_is_too_long_to_read() -> None:
    folders = [*PACKAGES, "tests", "examples", "benchmarks"]
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    too_long = {str(file.relative_to(ROOT)): lines for file in files if (lines := _lines(file)) > MAX_LINES}
    assert too_long == {}


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest imports a file of tests by its name alone, and files of several folders run in one process."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def test_no_room_is_too_full_to_look_over() -> None:
    files = [file.relative_to(ROOT) for file in _modules() if file.name != "__init__.py"]
    at_root = Counter(file.parent for file in files)
    assert {str(room): count for room, count in at_root.items() if count > MAX_FILES_AT_A_ROOMS_ROOT} == {}
    rooms = Counter(file.parts[:2] for file in files)
    assert {room: count for room, count in rooms.items() if count > MAX_SHARE_OF_A_ROOM * len(files)} == {}


def _modules() -> list[Path]:
    return [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def test_every_module_says_what_it_is() -> None:
    assert [str(file) for file in _modules() if not file.read_text().startswith('"""')] == []


def test_no_public_class_name_is_defined_twice() -> None:
    homes: dict[str, list[str]] = {}
    for file in _modules():
        for name in _classes(ast.parse(file.read_text())):
            homes.setdefault(name, []).append(str(file.relative_to(ROOT)))
    assert homes
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_classes_and_the_names_of_types_are_found() -> None:
    module = "class Trial: ...\nclass _Own: ...\nLength = dict[str, int]\nMOST = 3\nPlace: TypeAlias = int\n"
    assert list(_classes(ast.parse(module))) == ["Trial", "Length", "Place"]


def _classes(module: ast.Module) -> Iterator[str]:
    """The public classes of a module and its public names of types, which are capitalised as classes are."""
    for node in module.body:
        match node:
            case (
                ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(name))
            ):
                if re.match(r"[A-Z]\w*[a-z]", name):
                    yield name


# They try devices, or keep an import from them, before there is a rank: in processes of their own.
_TOUCH_A_DEVICE = ("trial_lib/launch/processes/tried_devices.py", "trial_lib/launch/processes/asked_device.py")
_ASKS_A_DEVICE = re.compile(r"torch\.cuda\b|\bdevice(\.type)? [!=]= [\"']")


def test_what_differs_from_device_to_device_is_asked_in_one_place() -> None:
    rooms = [ROOT / "trial_lib" / room for room in ("measure", "leave_alone", "flops", "launch", "study")]
    files = [file for room in rooms for file in room.rglob("*.py")]
    asking = {
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if _ASKS_A_DEVICE.search(line) and str(file.relative_to(ROOT)) not in _TOUCH_A_DEVICE
    }
    assert asking == set()
