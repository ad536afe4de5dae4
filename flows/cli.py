"""The entry of the console script. It handles Ctrl-C before it imports anything that takes time."""

from flows.interrupts import interrupts


def main() -> None:
    """Runs the command line."""
    interrupts.listen()
    from flows.command_line import run

    run()
