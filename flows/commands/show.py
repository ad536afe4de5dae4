"""`zerotune show`: a study's tables in the terminal, or all of it as JSON. It reads nothing but the study's folder."""

from pathlib import Path

import click

from flows.terminal import print_document


def show_command(study: str | None, as_json: bool) -> int:
    """Prints a study, which may be running, completed or interrupted.

    Args:
        study: its folder, its id, or the name of its experiment. None for the newest study in this folder.
        as_json: whether to print one JSON document.

    Returns:
        The exit code.

    Raises:
        InputError: there is no such study, or a file in its folder is damaged.
    """
    from trial_lib.report.read_study import read_study
    from trial_lib.study.kept.find_study import find_study

    view = read_study(find_study(study, Path.cwd()))
    if as_json:
        print_document(view.document())
        return 0
    from rich.console import Console

    from trial_lib.report.tables import print_study

    # A terminal breaks long lines. A file must not.
    console = Console() if click.get_text_stream("stdout").isatty() else Console(width=200)
    print_study(view, console)
    return 0
