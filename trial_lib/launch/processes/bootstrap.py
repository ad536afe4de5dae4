"""Starts a module of ZeroTune in the user's interpreter, which may not have ZeroTune installed."""

from pathlib import Path

# By the links that lead to it in the repository, as the names of modules have it.
PACKAGE = Path(__file__).absolute().parents[3]

# This makes `zerotune` and its alias `trial_lib` importable, and nothing else of the driver's environment. sys.path
# stays as the user's interpreter has it, except for the working directory, which `-c` puts first.
_SOURCE = """
import importlib, importlib.util, sys
sys.path.pop(0)
package, module = sys.argv[1:3]
init = package + "/__init__.py"
spec = importlib.util.spec_from_file_location("zerotune", init, submodule_search_locations=[package])
sys.modules["zerotune"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["zerotune"])
import zerotune.alias
importlib.import_module(module).main(sys.argv[3:])
"""


def command(interpreter: str, module: str, *arguments: str) -> list[str]:
    """Returns the command line that calls `main(arguments)` of a module of ZeroTune in another interpreter."""
    return [interpreter, "-c", _SOURCE, str(PACKAGE), module, *arguments]
