"""How a driver asks a training to save and stop, and what the training answers: empty files in one folder.

A rank imports this module from the user's environment: standard library only.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StopRequest:
    """The request to one full experiment.

    Attributes:
        folder: a folder of its own; it need not exist.
    """

    folder: Path

    @property
    def is_heeded(self) -> bool:
        """Whether the training looks for a request at all: only then is it worth waiting for."""
        return (self.folder / "heeded").exists()

    @property
    def is_made(self) -> bool:
        """Whether the training is asked to stop."""
        return (self.folder / "made").exists()

    @property
    def was_followed(self) -> bool:
        """Whether the training has stopped because it was asked to, before its end."""
        return (self.folder / "followed").exists()

    def heed(self) -> None:
        """Says, in a rank, that this training looks for a request."""
        self._leave("heeded")

    def make(self) -> None:
        """Asks the training to save and stop."""
        self._leave("made")

    def follow(self) -> None:
        """Says, in a rank, that this training stops because it was asked to."""
        self._leave("followed")

    def clear(self) -> None:
        """Takes everything back, before a training is started (again)."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _leave(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).touch()
