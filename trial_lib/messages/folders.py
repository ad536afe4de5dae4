"""Folders and files of a trial through which driver and ranks agree: the layer, NVMe swap, requests to stop."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from zerotune.trial_lib.messages.files import open_own

# A layer over the program's folder. The layer takes everything that a trial writes there.

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
    """A folder of the user's that the processes of a trial see through a layer of the trial's own."""

    folder: str  # the user's
    store: str  # the trial's folder that keeps the layer
    # The folders that the trial's processes write their records to. They find them `elsewhere`.
    records: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()  # ZeroTune's folders, in the user's folder or beside it, that the program does not see
    # Files and folders in the hidden ones that the user's command names. The program sees them read-only.
    named: tuple[str, ...] = ()
    through: tuple[str, ...] = ()  # other file systems that are mounted within the user's folder. They have no layer.
    # A folder outside of the user's, which only the trial's processes can look into. Empty until the layer is mounted.
    elsewhere: str = ""

    @property
    def upper(self) -> Path:
        return Path(self.store) / "upper"

    @property
    def work(self) -> Path:
        return Path(self.store) / "work"

    @property
    def below(self) -> Path:
        """The path at which the trial's processes find the user's folder without the layer, read-only."""
        return Path(self.elsewhere) / "below"

    @property
    def nothing(self) -> Path:
        """An empty file, which stands for the hidden files outside of the user's folder."""
        return Path(self.elsewhere) / "nothing"

    @property
    def prepared(self) -> Path:
        """The files that the program had prepared when it began to train, as a JSON list of paths."""
        return Path(self.store) / "prepared.json"

    def there(self, record: str) -> str:
        """Returns the path at which the trial's processes find one of the folders of records."""
        return str(Path(self.elsewhere, "records", Path(record).name))

    def as_seen(self, text: str) -> str:
        """Returns a text, such as JSON, with the paths of records as the trial's processes know them."""
        for record in self.records:
            for spelled in {record, _in_json(record)}:
                text = text.replace(spelled + os.sep, self.there(record) + os.sep)
        return text

    def as_recorded(self, text: str) -> str:
        """Returns JSON of the trial's processes with the paths of records as the driver knows them."""
        for record in self.records:
            text = text.replace(_in_json(self.there(record)) + os.sep, _in_json(record) + os.sep)
        return text

    def write(self) -> None:
        _record(Path(self.store)).write_text(json.dumps(asdict(self)))

    def unwrite(self) -> None:
        with contextlib.suppress(OSError):
            _record(Path(self.store)).unlink()

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
    return scratch / "layer"


def read_layer(scratch: Path) -> Layer | None:
    """Returns the layer that the processes of a trial see; None if they see the user's folder itself."""
    try:
        record = json.loads(_record(store_of(scratch)).read_text())
    except FileNotFoundError:
        return None
    # The trial's processes know the store by another path than the driver.
    return Layer(**{**record, "store": str(store_of(scratch))})


def is_opaque(path: str) -> bool:
    """Returns whether a folder in a layer hides the one below it."""
    return any(name.endswith(".overlay.opaque") for name in os.listxattr(path, follow_symlinks=False))


def _in_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _record(store: Path) -> Path:
    return store / "layer.json"


# A trial's own folder on the user's NVMe device. DeepSpeed swaps into it, and it is removed with the trial.

_DIGITS = 16


def own_folder(nvme_path: Path, scratch: Path) -> Path:
    """Returns a trial's own folder below the configuration's path, which may be that folder already."""
    name = _name(scratch)
    return nvme_path if nvme_path.name == name else nvme_path.absolute() / name


def note(scratch: Path, folder: Path) -> None:
    """Records, in a rank, that DeepSpeed may swap into a folder of the trial's own."""
    with contextlib.suppress(OSError), open_own(_notes(scratch), "a", encoding="utf-8") as file:
        file.write(f"{folder}\n")


def remove(scratch: Path) -> None:
    """Removes the files that a trial's ranks have swapped on this host. Call it when no rank is left."""
    with contextlib.suppress(OSError):
        for folder in set(_notes(scratch).read_text(encoding="utf-8").splitlines()):
            # The program may write anything into its scratch folder, so the name is checked.
            if Path(folder).name == _name(scratch):
                shutil.rmtree(folder, ignore_errors=True)


def _name(scratch: Path) -> str:
    layer, path = read_layer(scratch), str(scratch)
    if layer is not None:
        # The trial's processes know the folder by another path than the driver.
        path = json.loads(layer.as_recorded(json.dumps(path)))
    return f"zerotune-{hashlib.sha256(path.encode()).hexdigest()[:_DIGITS]}"


def _notes(scratch: Path) -> Path:
    return scratch / "swap_folders"


# A driver's request that a training save and stop, and the training's answers: empty files in one folder.


@dataclass(frozen=True)
class StopRequest:
    folder: Path  # a folder of its own, which need not exist

    @property
    def is_heeded(self) -> bool:
        """Whether the training looks for requests. If not, a driver should not wait for an answer."""
        return (self.folder / "heeded").exists()

    @property
    def is_made(self) -> bool:
        return (self.folder / "made").exists()

    @property
    def was_followed(self) -> bool:
        """Whether the training has stopped because of the request, before its end."""
        return (self.folder / "followed").exists()

    def heed(self) -> None:
        """Records, in a rank, that this training looks for requests."""
        self._leave("heeded")

    def make(self) -> None:
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
