"""A question to a program of the user's environment, before any rank starts."""

import subprocess
from collections.abc import Sequence

from trial_lib.command.words import Words


def ask(words: Words, command: Sequence[str], longest_s: float) -> "subprocess.CompletedProcess[str]":
    """Runs a command where the user's own would run, and returns its output.

    Args:
        words: of the user's command. They give the folder and the environment.
        command: the question.
        longest_s: seconds to wait for the answer.

    Raises:
        OSError: the command cannot be started.
        subprocess.TimeoutExpired: it has not answered in time.
    """
    return subprocess.run(
        list(command),
        cwd=words.folder,
        env=words.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=longest_s,
        check=False,
    )
