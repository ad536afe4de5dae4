"""A layer over the program's folder: what a trial writes there, apart from what is there.

A rank imports this module from the user's environment: standard library only.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_CACHES = (
    *("HF_DATASETS_CACHE", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME"),
    *("CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCH_HOME", "TRITON_CACHE_DIR"),
    *("MPLCONFIGDIR", "NUMBA_CACHE_DIR"),
)


def home_folder() -> Path:
    """Returns the user's home; where there is none, a name by which nothing is found."""
    return Path(os.path.expanduser("~"))  # noqa: PTH111 - Path's own raises where there is no home


def caches(environment: Mapping[str, str]) -> list[Path]:
    """Returns the folders in which libraries keep what they can make again; trials write there as any program does."""
    home = home_folder()
    named = (Path(environment[name]) for name in _CACHES if environment.get(name))
    return [home / ".cache", home / ".triton", *named]


@dataclass(frozen=True)
class Layer:
    """A folder of the user's that the processes of a trial see through a layer of the trial's own.

    Attributes:
        folder: the user's.
        store: the trial's folder, where the layer is kept.
        through: folders within the user's that the trial sees, and changes, as they are.
    """

    folder: str
    store: str
    through: tuple[str, ...] = ()

    @property
    def upper(self) -> Path:
        """What the trial has written."""
        return Path(self.store) / "upper"

    @property
    def work(self) -> Path:
        """The kernel's own."""
        return Path(self.store) / "work"

    @property
    def below(self) -> Path:
        """Where the trial's processes find the user's folder as it is."""
        return Path(self.store) / "below"

    @property
    def prepared(self) -> Path:
        """What the program had prepared when it began to train (a list of paths, as JSON)."""
        return Path(self.store) / "prepared.json"

    def write(self) -> None:
        """Records that the layer is in place."""
        _record(Path(self.store)).write_text(json.dumps(asdict(self)))

    def note_prepared(self, paths: Iterable[str]) -> None:
        """Notes what is prepared, as paths relative to the folder."""
        # Whole or not at all if a rank is killed, but not on the disk before a step goes on: after a loss of power the
        # trial is run again.
        aside = self.prepared.with_suffix(".new")
        aside.write_text(json.dumps(sorted(paths)))
        aside.replace(self.prepared)

    def noted(self) -> set[str] | None:
        """Returns what was prepared; None where the program has not come to train."""
        try:
            return set(json.loads(self.prepared.read_text()))
        except FileNotFoundError:
            return None


def store_of(scratch: Path) -> Path:
    """Returns where the layer of a trial with that scratch folder is kept."""
    return scratch / "layer"


def read_layer(scratch: Path) -> Layer | None:
    """Returns the layer that the processes of a trial see; None where they see the user's folder itself."""
    try:
        record = json.loads(_record(store_of(scratch)).read_text())
    except FileNotFoundError:
        return None
    return Layer(record["folder"], record["store"], tuple(record["through"]))


def is_opaque(path: str) -> bool:
    """Returns whether a folder in a layer hides the one below it."""
    return any(name.endswith(".overlay.opaque") for name in os.listxattr(path, follow_symlinks=False))


def _record(store: Path) -> Path:
    return store / "layer.json"
