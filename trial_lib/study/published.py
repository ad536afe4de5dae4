"""What others have published for trainings like the user's, and the user's own training as a row of that table.

`published.csv` has the fastest run of each source for a model, a length and a number of devices. Its runs train all
parameters in 16 bits without offload. FLOPs of a token are 6 for each parameter and those of attention without a causal
mask, as in a study (PaLM, appendix B). Runs in which attention is over a fifth of them are left out, because sources
differ in how they count it.
"""

import csv
from dataclasses import astuple, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from zerotune.trial_lib.device.data_sheets import peak_flops, sheet_name
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.folders import StudyPaths, StudyStatus
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.records.units import percent
from zerotune.trial_lib.study.folder import read_record
from zerotune.trial_lib.study.history import StudyState, read_history

TABLE = Path(__file__).with_name("published.csv")
_NEAR = {"parameters": 2.0, "length": 2.0, "devices": 4.0}  # how many times as much or as little is alike
_MOST_SOURCES = 2


@dataclass(frozen=True)
class PublishedTraining:
    """One row of the table. Its fields are the columns."""

    source: str  # where it is published
    model: str  # its name there; empty for a row that somebody shared
    parameters: int  # all of them are trained
    flops_per_token: int  # model FLOPs of forward and backward
    length: int  # tokens of a sample
    device: str  # the name of its data sheet
    devices: int
    tokens_per_second: int  # over all devices

    @property
    def mfu(self) -> float:
        """The model FLOPs utilisation, of the device's peak in 16 bits."""
        peak = peak_flops(self.device, "float16", 1.0)
        assert peak is not None
        return self.flops_per_token * self.tokens_per_second / self.devices / peak

    def is_like(self, other: "PublishedTraining") -> bool:
        pairs = ((getattr(self, name), getattr(other, name), times) for name, times in _NEAR.items())
        return self.device == other.device and all(
            one <= times * two and two <= times * one for one, two, times in pairs
        )

    def row(self) -> str:
        return ",".join(map(str, astuple(self)))


def own_training(best: TrialResult, profile: ModelProfile | None) -> PublishedTraining | None:
    """The training of a study's answer; None if the table cannot have it.

    `best` has the metrics of the answer. The table has trainings of all parameters of language models, in 16 bits, on
    whole GPUs of one kind whose data sheet is known.
    """
    metrics, models = best.metrics, {device.model for device in best.devices}
    device = sheet_name(models.pop()) if len(models) == 1 else ""
    tokens, samples = metrics.get("tokens_per_second", 0.0), metrics.get("throughput", 0.0)
    if not device or profile is None or profile.num_params != profile.trainable_num_params or not tokens or not samples:
        return None
    devices = len(best.memory.peak)
    own = PublishedTraining(
        source="zerotune share",
        model="",
        parameters=profile.num_params,
        flops_per_token=round(metrics.get("FLOPS_per_gpu", 0.0) * devices / tokens),
        length=round(tokens / samples),
        device=device,
        devices=devices,
        tokens_per_second=round(tokens),
    )
    # The trial's own figure is of the peak of its arithmetic. It is another one in 32 or 8 bits, and in a slice.
    return own if own.mfu and abs(metrics.get("mfu", 0.0) / own.mfu - 1) < 0.05 else None


def shared_training(paths: StudyPaths) -> PublishedTraining:
    """The confirmed answer of a study, by its median trial. It has numbers and the name of a product, and nothing of
    the user's. Raises InputError: there is no such answer, or the table cannot have it.
    """
    record, state = read_record(paths), StudyState(read_history(paths.history))
    best = None if record.best_number is None else state.results.get(record.best_number)
    is_confirmed = record.status is StudyStatus.COMPLETED and (record.gain_interval is not None or record.gain == 1.0)
    model = None if state.profile is None else state.profile.profile
    own = own_training(best, model) if best is not None and is_confirmed else None
    if own is None:
        raise InputError(
            "this study's answer is no row of the table of published trainings.",
            where=str(paths.root),
            remedy="Share a confirmed answer for a language model of which all parameters are trained in 16 bits, on "
            "GPUs of one kind.",
        )
    return own


def published_for(own: PublishedTraining | None) -> str:
    """A sentence with the MFU of published trainings like the user's; empty if none is known."""
    alike = [] if own is None else [each for each in published() if each.is_like(own)]
    if own is None or not alike:
        return ""
    shares = sorted(each.mfu for each in alike)
    ends = dict.fromkeys(percent(round(share, 2)) for share in (shares[0], shares[-1]))
    sources = list(dict.fromkeys(each.source for each in alike))
    more = f" and {len(sources) - _MOST_SOURCES} more" if len(sources) > _MOST_SOURCES else ""
    return (
        f"Your MFU is {percent(round(own.mfu, 2))}. Published for {own.device}, with half to twice the parameters and "
        f"the length, on a quarter to four times the devices: {' to '.join(ends)} "
        f"({', '.join(sources[:_MOST_SOURCES])}{more})."
    )


def published() -> list[PublishedTraining]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return TypeAdapter(list[PublishedTraining]).validate_python(list(csv.DictReader(file)))
