"""`pip install .` brings all that ZeroTune imports: what it imports is declared."""

import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import grimp
import pytest
import tomllib

ROOT = Path(__file__).parents[2]
# Imported only where the user's own program, or their option, has asked for them.
ASKED_FOR = {
    "transformers": "hf",
    "prefect-ray": "ray",
    "ray": "ray",
    "torch": "train",
    "deepspeed": "train",
    "py-cpuinfo": "train",
}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def named_in(requirements: list[str]) -> set[str]:
    """The names of the packages in requirements such as `fastapi<0.151`."""
    return {normalized(re.match(r"[\w.-]+", requirement).group()) for requirement in requirements}


def imported() -> dict[str, list[str]]:
    """The packages that ZeroTune's modules import, each with the modules that do."""
    graph = grimp.build_graph("zerotune", include_external_packages=True)
    own = {module for module in graph.modules if module.partition(".")[0] == "zerotune"}
    foreign = {module for module in graph.modules - own if module not in sys.stdlib_module_names}
    return {module: sorted(graph.find_modules_that_directly_import(module)) for module in foreign}


def test_every_package_that_is_imported_is_declared() -> None:
    declared = named_in(project()["dependencies"])
    distributions = packages_distributions()
    undeclared = {
        module: importers
        for module, importers in imported().items()
        if not {normalized(name) for name in distributions.get(module, [module])} & (declared | ASKED_FOR.keys())
    }
    assert undeclared == {}


@pytest.mark.parametrize(("package", "extra"), ASKED_FOR.items())
def test_a_package_that_only_some_use_is_in_an_extra(package: str, extra: str) -> None:
    assert package not in named_in(project()["dependencies"])
    names = named_in(project()["optional-dependencies"][extra])
    # prefect-ray brings Ray.
    assert package in names or f"prefect-{package}" in names
