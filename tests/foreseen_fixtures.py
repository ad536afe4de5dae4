"""What the tests of foreseen runs share: a script as a program."""

import os
import sys
from pathlib import Path

from trial_lib.launch.program import Program

PROGRAMS = Path(__file__).parent / "programs"


def program_named(name: str, *arguments: str, folder: Path = PROGRAMS, **variables: str) -> Program:
    """Returns a script of a folder as a program.

    Args:
        name: of the script.
        *arguments: of its command line.
        folder: that has it.
        **variables: of its environment, beside those of this process.
    """
    return Program(
        interpreter=sys.executable,
        target={"script": name},
        arguments=list(arguments),
        passes_local_rank=False,
        model_dir=folder,
        environment={**os.environ, **variables},
    )
