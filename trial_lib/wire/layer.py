"""A layer over the program's folder. The layer takes everything that a trial writes there.

A rank imports this module, so it needs only the standard library.
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
    """Returns the user's home. A user without one gets a name that matches no file."""
    return Path(os.path.expanduser("~"))  # noqa: PTH111 - Path's own raises where there is no home


def caches(environment: Mapping[str, str]) -> list[Path]:
    """Returns the folders of the libraries' caches. Trials write there as any program does."""
    home = home_folder()
    named = (Path(environment[name]) for name in _CACHES if environment.get(name))
    return [home / ".cache", home / ".triton", *named]


@dataclass(frozen=True)
class Layer:
    """A folder of the user's that the processes of a trial see through a layer of the trial's own.

    Attributes:
        folder: the user's.
        store: the trial's folder that keeps the layer.
        through: folders within the user's folder that have no layer. The trial changes them themselves.
    """

    folder: str
    store: str
    through: tuple[str, ...] = ()

    @property
    def upper(self) -> Path:
        """The files that the trial has written."""
        return Path(self.store) / "upper"

    @property
    def work(self) -> Path:
        """The working folder of the kernel."""
        return Path(self.store) / "work"

    @property
    def below(self) -> Path:
        """The path at which the trial's processes find the user's folder without the layer."""
        return Path(self.store) / "below"

    @property
    def prepared(self) -> Path:
        """The files that the program had prepared when it began to train, as a JSON list of paths."""
        return Path(self.store) / "prepared.json"

    def write(self) -> None:
        """Records that the layer is mounted."""
        _record(Path(self.store)).write_text(json.dumps(asdict(self)))

    def note_prepared(self, paths: Iterable[str]) -> None:
        """Records the prepared files, as paths relative to the folder."""
        # The file is whole or absent if a rank is killed. It is not synced, because a step must not wait for the disk.
        # After a loss of power the trial runs again.
        aside = self.prepared.with_suffix(".new")
        aside.write_text(json.dumps(sorted(paths)))
        aside.replace(self.prepared)

    def noted(self) -> set[str] | None:
        """Returns the prepared files; None if the program has not begun to train."""
        try:
            return set(json.loads(self.prepared.read_text()))
        except FileNotFoundError:
            return None


def store_of(scratch: Path) -> Path:
    """Returns the folder that keeps the layer of a trial with this scratch folder."""
    return scratch / "layer"


def read_layer(scratch: Path) -> Layer | None:
    """Returns the layer that the processes of a trial see; None if they see the user's folder itself."""
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
