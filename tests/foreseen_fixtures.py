"""What the tests of foreseen runs share: a script as a program, and runs of a text as a script."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.launch.rank_starter import Program
from zerotune.trial_lib.launch.starters import WarmStarter
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.simulation import Pretended, simulate, starter_for

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
        local_rank_option="",
        model_dir=folder,
        environment={**os.environ, **variables},
    )


@pytest.fixture(scope="session")
def foreseeing_starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmStarter]:
    """A starter of foreseen runs. It knows no program but its interpreter."""
    started = starter_for(program_named("transformer.py"), tmp_path_factory.mktemp("foreseeing"), print)
    yield started
    started.close()


@pytest.fixture
def foresee_text(foreseeing_starter: WarmStarter, tmp_path: Path) -> Callable[..., ForeseenRun]:
    """Foresees rank 0 of 2 of the text of a script, with a DeepSpeed configuration and perhaps on another device."""

    def run(text: str, config: Mapping[str, Any], **device: Any) -> ForeseenRun:
        (tmp_path / "train.py").write_text(text)
        (tmp_path / "ds_config.json").write_text(json.dumps(config))
        program = program_named("train.py", "--deepspeed_config", "ds_config.json", folder=tmp_path)
        pretended = Pretended(world=2, ranks_per_host=2, **device)
        return simulate(program, {}, pretended, tmp_path / "run", foreseeing_starter, deadline_s=120.0)

    return run
