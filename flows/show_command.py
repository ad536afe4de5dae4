"""`zerotune show`: a study's tables in the terminal, or all of it as JSON. It reads the study's folder alone."""

from pathlib import Path

import click

from flows.terminal import print_document


def show_command(study: str | None, as_json: bool) -> int:
    """Prints what there is to tell of a study: one that runs, one that has ended, one that was cut short.

    Args:
        study: its folder, id, or experiment's name; None for the newest in this folder.
        as_json: whether a program reads it.

    Returns:
        The exit code.

    Raises:
        InputError: there is no such study, or what stands in its folder is damaged.
    """
    from trial_lib.study.find_study import find_study
    from trial_lib.study.read_study import read_study

    view = read_study(find_study(study, Path.cwd()))
    if as_json:
        print_document(view.document())
        return 0
    from rich.console import Console

    from trial_lib.report.tables import print_study

    # Lines that a terminal would break are whole in a file.
    console = Console() if click.get_text_stream("stdout").isatty() else Console(width=200)
    print_study(view, console)
    return 0
