"""The command line: reads, checks, starts a flow.

Neither torch nor Prefect is imported until an experiment has been read and found good.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from pydantic import ValidationError

from flows.arguments import (
    MICRO_BATCH_OPTIONS,
    RECORD_OPTIONS,
    cut_off_command,
    method_options,
    spread_lists,
    tune_options,
    with_options,
)
from flows.interrupts import interrupts
from flows.process_limit import OUT_OF_PROCESSES, is_out_of_processes
from flows.service import ServerError
from flows.terminal import open_streams, say
from trial_lib.experiment.errors import InputError
from trial_lib.search.methods import METHODS, Method
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.disk_room import DiskFullError

FOUND, NONE_FOUND, BAD_INPUT = 0, 1, 2


@click.group(
    epilog="Exit codes: 0 a configuration was found (train: it has trained to its end), 1 none was (no trial "
    "completed, or the disk is full), 2 the input is wrong, 3 the full experiment failed, 4 the winner is slower than "
    "the last known one (--from-earlier; a failed full experiment is told first), 130 interrupted."
)
@click.version_option(package_name="zerotune")
def cli() -> None:
    """Finds the DeepSpeed configuration that trains your model fastest on your hardware."""


def _method_command(method: Method) -> None:
    """Adds the command of one search method."""

    def command(**options: Any) -> None:
        _tune(method.name, options)

    command.__doc__ = method.help
    cli.command(method.name)(with_options(command, method_options(method)))


for each in METHODS.values():
    if each.confirms_winner:
        _method_command(each)


def _typed_command(name: str, method: str | None, options: list[Any], help_text: str) -> None:
    """Adds a command that tunes what is typed behind `--`."""

    @click.pass_obj
    def command(typed: tuple[str, ...], **options: Any) -> None:
        _tune_typed(name, method, typed, options)

    command.__doc__ = help_text
    cli.command(name, options_metavar="[OPTIONS] -- COMMAND...")(with_options(command, options))


_typed_command(
    "tune",
    None,
    tune_options(),
    """Finds the fastest configuration for COMMAND: what you type to train, such as `deepspeed train.py ARGUMENTS`.

    COMMAND runs in this folder. One that starts its training by way of others, as `bash run.sh` does, is followed.
    """,
)
_typed_command(
    "micro-batch",
    "micro_batch",
    MICRO_BATCH_OPTIONS,
    """Finds the largest and the fastest micro-batch size for COMMAND, its configuration otherwise as it is.

    COMMAND is what you type to train, such as `deepspeed train.py ARGUMENTS`, and runs in this folder.
    """,
)


@cli.command()
@click.argument("study", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document on standard output.")
def resume(study: Path, as_json: bool) -> None:
    """Goes on with a STUDY that was interrupted, or whose full experiment failed: a folder in zerotune-studies."""
    from flows.command import resume_command

    _run(lambda: resume_command(study, as_json))


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
def sync(folder: Path) -> None:
    """Sends to MLflow what it has not of FOLDER: a study, or a full experiment, that ran while MLflow was away."""
    from flows.sync_command import sync_command

    _run(lambda: sync_command(folder))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document on standard output.")
def doctor(as_json: bool) -> None:
    """Looks at what usually goes wrong on a machine, and says how to mend each; exit code 1 where something fails."""
    from flows.doctor_command import doctor_command

    _run(lambda: doctor_command(as_json))


@cli.command()
@click.argument("study", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print all of it as one JSON document on standard output.")
def show(study: str | None, as_json: bool) -> None:
    """Shows a STUDY: one that runs, has ended, or was cut short.

    STUDY is a folder, a study's id, or an experiment's name, whose newest study is shown; without it the newest study
    in zerotune-studies is.
    """
    from flows.show_command import show_command

    _run(lambda: show_command(study, as_json))


@cli.command()
@click.argument("config_path", type=click.Path(path_type=Path))
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option(
    "--ds-config",
    type=click.Path(path_type=Path),
    help="A DeepSpeed configuration that is merged into the experiment's own, such as a study's best_ds_config.json.",
)
@click.option(
    "-i",
    "--include",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Files or folders that the code imports from outside the model directory: PATH PATH ...",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the newest full experiment of this name, in this folder, that has not come to its end.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document on standard output.")
def train(resume: bool, as_json: bool, **options: Any) -> None:
    """Trains at full length: the experiment in CONFIG_PATH, with the code in MODEL_DIR."""

    def command() -> int:
        from flows.train_command import train_command
        from trial_lib.study.full_experiment import TrainingArguments

        return train_command(TrainingArguments(**options), resume, as_json)

    _run(command)


@cli.command()
@click.argument("config_path", type=click.Path(path_type=Path))
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option(
    "-i",
    "--include",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Files or folders that the code imports from outside the model directory: PATH PATH ...",
)
@click.option("--max-micro-batch", type=int, help="The largest micro-batch size of interest, in samples.")
@click.option(
    "--memory-headroom", type=float, default=0.05, show_default=True, help="Share of a slot's memory to leave free."
)
@click.option("--json", "as_json", is_flag=True, help="Print the table as one JSON document on standard output.")
def estimate(**options: Any) -> None:
    """Shows what each ZeRO stage would need, and its largest micro-batch: the experiment in CONFIG_PATH.

    The code is in MODEL_DIR. Earlier studies of the experiment in this folder are used; else one profile trial is run.
    """

    def command() -> int:
        from flows.estimate_command import estimate_command

        return estimate_command(**options)

    _run(command)


@cli.command()
@click.option("--prefect-port", type=click.IntRange(1, 65535), default=4200, show_default=True, help="Of Prefect's UI.")
@click.option("--mlflow-port", type=click.IntRange(1, 65535), default=5000, show_default=True, help="Of MLflow's UI.")
def up(prefect_port: int, mlflow_port: int) -> None:
    """Starts a Prefect server, a worker and the MLflow UI on loopback, until Ctrl-C or `zerotune down`.

    Deployed runs write their studies in this folder.
    """

    def command() -> int:
        from flows.up import up_command

        return up_command(prefect_port, mlflow_port)

    _run(command)


@cli.command()
def down() -> None:
    """Stops the `zerotune up` of another terminal, and all that it has started."""

    def command() -> int:
        from flows.up import down_command

        return down_command()

    _run(command)


def _record(output: Path, micro_batch_sizes: tuple[int, ...], repeats: int, **options: Any) -> None:
    """Measures every configuration of the experiment's search space, for searches to be replayed on.

    The experiment in CONFIG_PATH, with the code in MODEL_DIR; `search_space` in CONFIG_PATH says what is varied.
    """

    def command() -> int:
        from flows.record_command import record_command

        arguments = _checked("record", "adaptive", {}, options)
        return record_command(arguments, sorted(set(micro_batch_sizes)), repeats, output)

    _run(command)


cli.command("record")(with_options(_record, RECORD_OPTIONS))


def _tune(method: str, options: dict[str, Any]) -> None:
    as_json = options.pop("as_json")
    own = {name: options.pop(name) for name in list(options) if name not in StudyArguments.model_fields}
    settings = {name: value for name, value in own.items() if value is not None}

    def command() -> int:
        from flows.command import tune_command

        return tune_command(_checked(method, method, settings, options), as_json)

    _run(command)


def _tune_typed(name: str, method: str | None, typed: tuple[str, ...], options: dict[str, Any]) -> None:
    """Tunes a command.

    Args:
        name: of zerotune's command.
        method: of the search; None where an option says it.
        typed: the command's words.
        options: zerotune's own.
    """
    as_json, mappings = options.pop("as_json"), options.pop("mappings")
    chosen = options.pop("method") if method is None else method
    if method is not None:
        options["metric"] = "throughput"

    def command() -> int:
        from flows.command import tune_command
        from trial_lib.study.typed_command import check_mappings

        told = {**options, "command": typed, "model_dir": Path.cwd(), "arg_mappings": check_mappings(mappings)}
        return tune_command(_checked(name, chosen, {}, told), as_json)

    _run(command)


def _checked(name: str, method: str, settings: dict[str, Any], options: dict[str, Any]) -> StudyArguments:
    """Returns the arguments, the method's own settings included, or an error that names the flag."""
    if not options.get("zero_stages"):
        options = {name: value for name, value in options.items() if name != "zero_stages"}
    try:
        METHODS[method].settings(**settings)
        return StudyArguments(method=method, settings=settings, **options)
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][0]).replace("_", "-") if first["loc"] else "the arguments"
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{message}.", where=flag, remedy=f"See zerotune {name} --help.") from None


def _run(command: Callable[[], int]) -> NoReturn:
    try:
        interrupts.end(interrupts.run(command))
    except InputError as error:
        say(f"zerotune: {error}")
        interrupts.end(BAD_INPUT)
    except (ServerError, DiskFullError) as error:
        say(f"zerotune: {error}")
        interrupts.end(NONE_FOUND)
    except (RuntimeError, OSError) as error:
        if not is_out_of_processes(error):
            raise
        say(f"zerotune: {OUT_OF_PROCESSES}")
        interrupts.end(BAD_INPUT)


def run() -> NoReturn:
    """Runs the command that was typed."""
    open_streams()
    try:
        own, typed = cut_off_command(sys.argv[1:])
    except InputError as error:
        say(f"zerotune: {error}")
        sys.exit(BAD_INPUT)
    cli(args=spread_lists(own), obj=typed, prog_name="zerotune")
