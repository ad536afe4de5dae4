"""The command line: it reads and checks the arguments, and starts a flow.

It imports neither torch nor Prefect until an experiment has been read and is valid.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
import tomllib
from pydantic import ValidationError

from zerotune.flows.interrupts import interrupts
from zerotune.flows.options import (
    ESTIMATE_OPTIONS,
    JSON,
    MICRO_BATCH_OPTIONS,
    PLAN_OPTIONS,
    TRAIN_OPTIONS,
    Commands,
    Section,
    TypedCommand,
    TypedOrReadCommand,
    method_options,
    tune_options,
    with_options,
)
from zerotune.flows.prefect_server import OUT_OF_PROCESSES, ServerError, is_out_of_processes, log_in
from zerotune.flows.terminal import open_streams, say, say_error
from zerotune.trial_lib.inputs.launchers import launchers_listed
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.search.methods import METHODS, Method
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.folder import FolderError

FOUND, NONE_FOUND, BAD_INPUT = 0, 1, 2


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 a configuration was found (train: the training reached its end), 1 none was found (no trial "
    "completed, or the disk is full), 2 the input is wrong, 3 the full experiment failed, 4 the winner is slower than "
    "the last known one (--from-earlier; a failed full experiment is reported first), 5 a file of the answer could not "
    "be written, 130 interrupted.",
)
@click.version_option(package_name="zerotune")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Find the DeepSpeed configuration that trains your model fastest on your hardware."""
    if ctx.invoked_subcommand is None:
        click.echo(cli.first_steps(), err=True)
        ctx.exit(BAD_INPUT)
    try:
        ctx.default_map = _defaults(Path.cwd())
    except InputError as error:
        say_error(error)
        ctx.exit(BAD_INPUT)
    log_in()


def _defaults(folder: Path) -> dict[str, dict[str, Any]]:
    # The flags' defaults of each command, from the table `tool.zerotune` of a project's pyproject.toml.
    file = next((each for each in (at / "pyproject.toml" for at in (folder, *folder.parents)) if each.is_file()), None)
    if file is None:
        return {}
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("zerotune", {})
    except (OSError, ValueError) as error:
        say(f"note: {file} gives no defaults: {error}")
        return {}
    if not isinstance(given, dict):
        raise InputError("it is no table.", where=f"{file}: tool.zerotune", remedy="Write [tool.zerotune] above flags.")
    taken = {name: {each.name for each in command.params if each.name} for name, command in cli.commands.items()}
    names = {str(key).replace("-", "_"): value for key, value in given.items()}
    unknown = sorted(names.keys() - set().union(*taken.values()))
    if unknown:
        what = f"no command has the flag --{unknown[0].replace('_', '-')}."
        raise InputError(what, where=f"{file}: [tool.zerotune]", remedy="See zerotune tune --help, or remove the key.")
    return {command: {name: names[name] for name in own & names.keys()} for command, own in taken.items()}


def _typed_command(name: str, method: str | None, options: list[Any], help_text: str) -> None:
    # Adds a command that tunes the training command behind `--`.

    def command(typed: tuple[str, ...], **options: Any) -> None:
        if method is not None:
            options["metric"] = "throughput"
        _tune(name, method or options.pop("method"), options, typed)

    command.__doc__ = help_text
    added = cli.command(name, cls=TypedCommand, section=Section.TUNE, options_metavar="[OPTIONS] -- COMMAND...")
    added(with_options(command, options))


_typed_command(
    "tune",
    None,
    tune_options(),
    f"""Find the fastest configuration.

    COMMAND is what you type to train, such as `deepspeed train.py ARGUMENTS`. It runs in this folder. It begins with
    python, {launchers_listed()}. If it starts the training through other commands, as `bash run.sh` does, ZeroTune
    follows them.
    """,
)
_typed_command(
    "micro-batch",
    "micro_batch",
    MICRO_BATCH_OPTIONS,
    """Find the largest and fastest micro-batch.

    COMMAND is what you type to train, such as `deepspeed train.py ARGUMENTS`. It runs in this folder. Nothing else in
    its configuration changes.
    """,
)


@cli.command(section=Section.TUNE)
@click.argument("study", type=click.Path(path_type=Path))
@JSON
def resume(study: Path, as_json: bool) -> None:
    """Resume an interrupted study.

    STUDY is its folder in zerotune-studies. A study whose full experiment failed is resumed as well.
    """
    from zerotune.flows.tuning import resume_command

    _run(lambda: resume_command(study, as_json))


@cli.command(section=Section.TUNE)
@click.argument("study", required=False)
@JSON
def show(study: str | None, as_json: bool) -> None:
    """Show a study and its answer.

    STUDY is a folder, a study's id, or the name of an experiment, whose newest study is shown. Without it the newest
    study in zerotune-studies is shown. The study may be running, completed or interrupted. It may also be the folder or
    the id of a plan.
    """
    from zerotune.flows.records import show_command

    _run(lambda: show_command(study, as_json))


@cli.command("list", section=Section.TUNE)
@JSON
def list_studies(as_json: bool) -> None:
    """List the studies of this folder.

    The oldest comes first, each with its gain and its answer.
    """
    from zerotune.flows.records import list_command

    _run(lambda: list_command(as_json))


@cli.command(section=Section.TUNE)
@click.argument("first")
@click.argument("second")
@JSON
def compare(first: str, second: str, as_json: bool) -> None:
    """Compare the answers of two studies.

    FIRST and SECOND are named as for `show`. What differs is shown: gains, versions, devices, settings.
    """
    from zerotune.flows.records import compare_command

    _run(lambda: compare_command(first, second, as_json))


@cli.command(section=Section.TUNE)
@click.argument("study")
@click.argument("archive", required=False, type=click.Path(path_type=Path))
def export(study: str, archive: Path | None) -> None:
    """Write a study's answer as a ZIP file.

    ARCHIVE holds the answer, its report and figures, for somebody who has no ZeroTune. Logs, code and secrets are left
    out. Without it the file is named after the study.
    """
    from zerotune.flows.records import export_command

    _run(lambda: export_command(study, archive))


@cli.command(section=Section.TUNE)
@click.argument("study")
def share(study: str) -> None:
    """Print a study's answer for others.

    It is a row of the table of published trainings, ready for a pull request: a GPU's name, and numbers. No name, path
    or text of yours is in it.
    """
    from zerotune.flows.records import share_command

    _run(lambda: share_command(study))


@cli.command(section=Section.TUNE)
@click.argument("studies", nargs=-1, required=True, metavar="STUDY...")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def rm(studies: tuple[str, ...], yes: bool) -> None:
    """Remove studies from the disk.

    STUDY is named as for `show`. A study that is running is not removed. What MLflow has of it stays there.
    """
    from zerotune.flows.records import remove_command

    _run(lambda: remove_command(studies, yes))


@cli.command(section=Section.TUNE)
@click.argument("study", required=False)
@click.option("--backup", is_flag=True, help="Keep each file beside itself, as NAME.before-zerotune.")
def apply(study: str | None, backup: bool) -> None:
    """Write a study's answer into your files.

    It makes the changes that the study has shown as a diff. STUDY is as in `zerotune show`. If one of the files has
    changed since the study began, none is written.
    """
    from zerotune.flows.apply import apply_command

    _run(lambda: apply_command(study, backup))


def _plan(
    typed: tuple[str, ...], mappings: tuple[str, ...], varied: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Plan for hardware that you do not have.

    Foresees which configurations fit on devices that are not here, and how fast they train. COMMAND is what you type to
    train, such as `deepspeed train.py ARGUMENTS`. It runs on this host without its weights, as one of the ranks.
    Instead of it, CONFIG_PATH can be an experiment's YAML, and MODEL_DIR the folder with its code.
    """

    def command() -> int:
        from zerotune.flows.planning import plan_command
        from zerotune.trial_lib.plan.plan_record import PlanArguments

        given = {**options, **_as_typed(typed, mappings, varied)}
        with _named_mistakes("plan"):
            arguments = PlanArguments(**given)
        return plan_command(arguments, as_json)

    _run(command)


cli.command("plan", cls=TypedOrReadCommand, section=Section.TUNE, options_metavar="[OPTIONS] -- COMMAND... |")(
    with_options(_plan, PLAN_OPTIONS)
)


def _estimate(as_json: bool, **options: Any) -> None:
    """Estimate what fits in memory.

    Lists what each ZeRO stage needs, and its largest micro-batch. CONFIG_PATH is the experiment's YAML, and MODEL_DIR
    the folder with its code. Earlier studies of the experiment in this folder are used. If there are none, one profile
    trial runs.
    """

    def command() -> int:
        from zerotune.flows.planning import estimate_command

        with _named_mistakes("estimate"):
            arguments = StudyArguments(**options)
        return estimate_command(arguments, as_json)

    _run(command)


cli.command("estimate", section=Section.TUNE)(with_options(_estimate, ESTIMATE_OPTIONS))


def _train(resume: bool, as_json: bool, **options: Any) -> None:
    """Train at full length.

    CONFIG_PATH is the experiment's YAML, and MODEL_DIR the folder with its code.
    """
    from zerotune.flows.tuning import train_command
    from zerotune.trial_lib.study.full_experiment import TrainingArguments

    _run(lambda: train_command(TrainingArguments(**options), resume, as_json))


cli.command("train", section=Section.TRAIN)(with_options(_train, TRAIN_OPTIONS))


@cli.command(section=Section.SERVERS)
@click.option(
    "--prefect-port",
    type=click.IntRange(1, 65535),
    default=4200,
    show_default=True,
    help="Serve Prefect's UI and API on this port.",
)
@click.option(
    "--mlflow-port",
    type=click.IntRange(1, 65535),
    default=5000,
    show_default=True,
    help="Serve MLflow's UI on this port.",
)
def up(prefect_port: int, mlflow_port: int) -> None:
    """Start Prefect, a worker and the MLflow UI.

    They listen on loopback until Ctrl-C or `zerotune down`. Deployed runs write their studies in this folder.
    """
    from zerotune.flows.up import up_command

    _run(lambda: up_command(prefect_port, mlflow_port))


@cli.command(section=Section.SERVERS)
def down() -> None:
    """Stop what `zerotune up` has started.

    Any terminal will do.
    """
    from zerotune.flows.up import down_command

    _run(down_command)


@cli.command(section=Section.SERVERS)
@JSON
def doctor(as_json: bool) -> None:
    """Check this machine for common problems.

    Each problem is listed with its remedy. The exit code is 1 if a check fails.
    """
    from zerotune.flows.doctor import doctor_command

    _run(lambda: doctor_command(as_json))


@cli.command(section=Section.SERVERS)
@click.argument("folder", type=click.Path(path_type=Path))
def sync(folder: Path) -> None:
    """Send MLflow what it has missed.

    FOLDER is a study, a full experiment or a plan that ran while MLflow did not answer.
    """
    from zerotune.flows.records import sync_command

    _run(lambda: sync_command(folder))


def _method_command(method: Method) -> None:
    # Adds the command of one search method.

    def command(**options: Any) -> None:
        _tune(method.name, method.name, options)

    command.__doc__ = (
        f"{method.help}\n\nCONFIG_PATH is the experiment's YAML, and MODEL_DIR the folder with its code. "
        f"`zerotune tune --method {method.name}` searches in the same way for a command."
    )
    cli.command(method.name, section=Section.METHODS)(with_options(command, method_options(method)))


for each in METHODS.values():
    if each.confirms_winner:
        _method_command(each)


def _tune(name: str, method: str, options: dict[str, Any], typed: tuple[str, ...] = ()) -> None:
    # Tunes the experiment of a YAML, or a typed command, by a method.
    as_json, mappings, varied = options.pop("as_json"), options.pop("mappings", ()), options.pop("varied", ())
    own = {option: options.pop(option) for option in list(options) if option not in StudyArguments.model_fields}
    settings = {option: value for option, value in own.items() if value is not None}

    def command() -> int:
        from zerotune.flows.tuning import tune_command

        given = {**options, **_as_typed(typed, mappings, varied)} if typed else options
        return tune_command(_checked(name, method, settings, given), as_json)

    _run(command)


def _as_typed(typed: tuple[str, ...], mappings: tuple[str, ...], varied: tuple[str, ...]) -> dict[str, Any]:
    from zerotune.trial_lib.inputs.search_space import read_vary
    from zerotune.trial_lib.study.typed_command import check_mappings

    given = {"command": typed, "arg_mappings": check_mappings(mappings), "vary": read_vary(varied)}
    return {**given, "model_dir": Path.cwd()} if typed else given


def _checked(name: str, method: str, settings: dict[str, Any], options: dict[str, Any]) -> StudyArguments:
    if not options.get("zero_stages"):
        options = {name: value for name, value in options.items() if name != "zero_stages"}
    with _named_mistakes(name):
        METHODS[method].settings(**settings)
        return StudyArguments(method=method, settings=settings, **options)


@contextlib.contextmanager
def _named_mistakes(name: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][0]).replace("_", "-") if first["loc"] else "the arguments"
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{message}.", where=flag, remedy=f"See zerotune {name} --help.") from None


def _run(command: Callable[[], int]) -> NoReturn:
    try:
        interrupts.end(interrupts.run(command))
    except InputError as error:
        say_error(error)
        interrupts.end(BAD_INPUT)
    except (ServerError, FolderError) as error:
        say_error(error)
        interrupts.end(NONE_FOUND)
    except (RuntimeError, OSError) as error:
        if not is_out_of_processes(error):
            raise
        say_error(OUT_OF_PROCESSES)
        interrupts.end(BAD_INPUT)


def run() -> NoReturn:
    open_streams()
    cli(prog_name="zerotune")
