"""The rules of the house that no single module shows."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "tasks", "trial_lib")
# The public face, which has no folder of its own beside these.
OWN = [ROOT / "zerotune" / name for name in ("__init__.py", "__main__.py", "api.py", "alias/__init__.py")]

# A budget: it may only fall, until something is worth the room that it takes.
MAX_LINES = 76_357
MAX_FILES = {"flows": 20, "tasks": 6, "trial_lib": 238}
MAX_IMPORTED = 20
# These import more of our modules than that. A number may only fall.
IMPORT_MORE = {
    "zerotune.trial_lib.report.read_study": 21,
    "zerotune.trial_lib.study.profile": 21,
    "zerotune.trial_lib.study.open_full_experiment": 25,
}
# Processes of their own: nothing imports them, or what starts them names their file.
ENTRIES = {
    "zerotune.flows.cli",
    "zerotune.flows.plan",
    "zerotune.trial_lib.core",
    "zerotune.trial_lib.device.cuda_variables",
    "zerotune.trial_lib.dsat",
    "zerotune.trial_lib.plan.simulate.patches",
}


@pytest.mark.long
def test_imports_run_one_way() -> None:
    """As `make lint` says too."""
    linter = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, text=True, capture_output=True
    )
    assert linter.returncode == 0, linter.stdout + linter.stderr


def test_no_two_modules_need_each_other() -> None:
    """Not by an import inside a function either, nor by one that only a type checker sees."""
    graph = _graph()
    needs = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(needs).prepare()


def test_the_command_line_imports_nothing_heavy() -> None:
    flows = "import zerotune.flows.command_line, zerotune.flows.tuning, zerotune.flows.up, sys"
    code = f"{flows}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    imported = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    assert not {"torch", "deepspeed", "prefect", "mlflow"} & set(imported.stdout.split())


def test_what_only_some_studies_need_is_imported_where_they_do() -> None:
    """A study without Ray or transformers runs in an environment that lacks them."""
    # What ranks need is in the environment that a program trains in.
    of_ranks = re.compile(r"extra == .train.")
    needed = [each for each in metadata.requires("zerotune") or () if "extra ==" not in each or of_ranks.search(each)]
    names = {re.split(r"[<>=;\[ ]", each)[0].replace("-", "_") for each in needed}
    ours = {"zerotune", *names, *sys.stdlib_module_names, "yaml", "pynvml", "cpuinfo"}
    others = {
        _name(file): module
        for file in _modules()
        for node in ast.parse(file.read_text()).body
        for module in _imported_by(node)
        if module.partition(".")[0] not in ours
    }
    assert set(others) == {"zerotune.tasks.ray_trial", "zerotune.trial_lib.launch.ray_cluster"}
    at_top = {
        _name(file)
        for file in _modules()
        for node in ast.parse(file.read_text()).body
        for module in _imported_by(node)
        if module in others
    }
    assert at_top <= set(others)


def _imported_by(node: ast.stmt) -> list[str]:
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names):
            return [module, *(f"{module}.{alias.name}" for alias in names)]
    return []


def test_the_product_grows_no_longer() -> None:
    assert sum(len(file.read_text().splitlines()) for file in _modules()) <= MAX_LINES
    files = Counter(file.relative_to(ROOT / "zerotune").parts[0] for file in _modules() if file not in OWN)
    assert {package: count for package, count in files.items() if count > MAX_FILES[package]} == {}


def test_no_module_needs_half_of_the_house() -> None:
    needs = {module: len(imported) for module, imported in _imports().items()}
    too_many = {module: count for module, count in needs.items() if count > IMPORT_MORE.get(module, MAX_IMPORTED)}
    assert too_many == {}


def test_no_two_folders_need_each_other() -> None:
    folders = {(_folder(module), _folder(imported)) for module, found in _imports().items() for imported in found}
    assert {pair for pair in folders if pair[::-1] in folders and pair[0] != pair[1]} == set()


def test_no_small_file_stands_beside_its_only_reader() -> None:
    importers = Counter(imported for found in _imports().values() for imported in found)
    small = {
        _name(file)
        for file in _modules()
        if file.name not in ("__init__.py", "__main__.py") and len(file.read_text().splitlines()) < 60
    }
    assert {module for module in small - ENTRIES if importers[module] <= 1} == set()


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("zerotune", cache_dir=None)


@cache
def _imports() -> dict[str, set[str]]:
    """The modules of ours that each imports, packages aside, by an import inside a function as well."""
    graph = _graph()
    packages = {_name(file.parent / "__init__.py") for file in _modules()}
    return {module: graph.find_modules_directly_imported_by(module) - packages for module in graph.modules}


def _name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _folder(module: str) -> str:
    file = ROOT.joinpath(*module.split("."))
    return module if file.is_dir() else module.rpartition(".")[0]


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest imports a file of tests by its name alone, and files of several folders run in one process."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def _modules() -> list[Path]:
    return [*OWN, *(file for package in PACKAGES for file in sorted((ROOT / "zerotune" / package).rglob("*.py")))]


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


# They try devices, or keep an import from them, before there is a rank: in processes of their own. `device.py` is the
# place, and whether a model can be compiled depends on the device it is on.
_TOUCH_A_DEVICE = (
    "trial_lib/launch/processes/environment_check.py",
    "trial_lib/rank/device.py",
    "trial_lib/rank/model_transforms.py",
)
_ASKS_A_DEVICE = re.compile(r"torch\.cuda\b|\bdevice(\.type)? [!=]= [\"']")


def test_what_differs_from_device_to_device_is_asked_in_one_place() -> None:
    rooms = [ROOT / "trial_lib" / room for room in ("rank", "launch", "study")]
    files = [file for room in rooms for file in room.rglob("*.py")]
    asking = {
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if _ASKS_A_DEVICE.search(line) and str(file.relative_to(ROOT)) not in _TOUCH_A_DEVICE
    }
    assert asking == set()
