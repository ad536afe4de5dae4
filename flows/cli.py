"""Entry of the console script: hears Ctrl-C before it imports what takes time."""

from flows.interrupts import interrupts


def main() -> None:
    """Runs the command line."""
    interrupts.listen()
    from flows.command_line import run

    run()
