"""What is built ahead, and how little has to be installed for it."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from zerotune.flows.prepare import ops_of_study

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "hello_deepspeed"
# Of the interpreter and of this environment.
NO_PACKAGE = re.compile(r"__|_sysconfigdata|_distutils_hack|_?cython")
IMPORTED = f"""
import sys
from pathlib import Path
from zerotune.flows.prepare import ops_of_study
ops_of_study(Path({str(EXAMPLE / "demo.yaml")!r}), Path({str(EXAMPLE)!r}))
print(*{{name.partition(".")[0] for name in sys.modules}} - sys.stdlib_module_names)
"""


def with_requirements(names: list[str]) -> set[str]:
    """The names of packages, and of all that pip installs with them."""
    found: set[str] = set()
    wanted = [name.lower() for name in names]
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found.add(name)
        requirements = map(Requirement, lines)
        wanted += [each.name.lower() for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})]
    return {re.sub(r"[-_.]+", "-", name) for name in found}


def test_the_ops_of_a_study_are_known_as_soon_as_the_first_packages_are_there() -> None:
    (early,) = re.findall(r"^EARLY := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    printed = subprocess.run([sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = {name for name in printed.stdout.split() if not NO_PACKAGE.match(name)} - {"zerotune"}
    there = with_requirements(early.split())
    distributions = packages_distributions()
    missing = {
        module
        for module in modules
        if not {re.sub(r"[-_.]+", "-", name).lower() for name in distributions.get(module, [module])} & there
    }
    assert missing == set()


def test_the_demo_needs_no_op_that_takes_minutes() -> None:
    ops = ops_of_study(EXAMPLE / "demo.yaml", EXAMPLE)
    assert set(ops) <= {"ShareMemCommBuilder"}
