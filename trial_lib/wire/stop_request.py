"""A driver's request that a training save and stop, and the training's answers: empty files in one folder.

A rank imports this module, so it needs only the standard library.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StopRequest:
    """The request to one full experiment.

    Attributes:
        folder: a folder of its own, which need not exist.
    """

    folder: Path

    @property
    def is_heeded(self) -> bool:
        """Whether the training looks for requests. If not, a driver should not wait for an answer."""
        return (self.folder / "heeded").exists()

    @property
    def is_made(self) -> bool:
        """Whether the driver has asked the training to stop."""
        return (self.folder / "made").exists()

    @property
    def was_followed(self) -> bool:
        """Whether the training has stopped because of the request, before its end."""
        return (self.folder / "followed").exists()

    def heed(self) -> None:
        """Records, in a rank, that this training looks for requests."""
        self._leave("heeded")

    def make(self) -> None:
        """Asks the training to save and stop."""
        self._leave("made")

    def follow(self) -> None:
        """Records, in a rank, that this training stops because of the request."""
        self._leave("followed")

    def clear(self) -> None:
        """Removes the request and all answers, before a training starts."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _leave(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).touch()
