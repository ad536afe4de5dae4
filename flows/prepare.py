"""Does once, and without a deadline, what the first command of a fresh machine would have to wait for.

    python -m zerotune.flows.prepare                  Prefect's database, and the operators that most configurations use
    python -m zerotune.flows.prepare EXPERIMENT CODE  only the operators that a study of this experiment uses

The second needs torch, DeepSpeed and some small packages (`EARLY` in the Makefile), and so it can run while pip still
installs the rest.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from zerotune.flows.interrupts import interrupts
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.inputs.entrypoint import default_interpreter
from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.launch.starters import OpBuilds, rank_environment
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.limits import supposed_ops
from zerotune.trial_lib.study.program import with_build_folder

COMMON_OPS = ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder")


def prepare() -> int:
    """Migrates the database of ZeroTune's own Prefect server, and builds the common operators.

    An operator that cannot be built is named on standard error, and is no failure: the machine may never need it.
    """
    # Only here: Prefect may not be installed yet where the operators of a study are built ahead.
    from zerotune.flows.prefect_server import is_configured, migrate_own_database

    if not is_configured():
        say("migrating Prefect's database")
        migrate_own_database()
    build(COMMON_OPS)
    return 0


def ops_of_study(config_path: Path, model_dir: Path) -> list[str]:
    """Returns the operators that a study of an experiment on this host may use, if it keeps to the default method."""
    experiment = read_experiment(config_path, model_dir)
    arguments = StudyArguments(config_path=config_path, model_dir=model_dir)
    return supposed_ops(experiment, arguments, this_host().device)


def build(ops: Sequence[str]) -> dict[str, str]:
    """Returns the reason for each operator that cannot be built. The compilers end with this process."""
    interpreter = default_interpreter()
    builds = OpBuilds(interpreter, with_build_folder(rank_environment(interpreter), interpreter), say)
    builds.start(ops)
    builds.wait()
    return builds.cannot


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    arguments = [Path(argument) for argument in sys.argv[1:]]
    if not arguments:
        return prepare()
    if len(arguments) != 2:
        say("usage: python -m zerotune.flows.prepare [EXPERIMENT CODE]")
        return 2
    try:
        return int(bool(build(ops_of_study(*arguments))))
    except InputError as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    interrupts.listen()
    sys.exit(interrupts.run(main))
