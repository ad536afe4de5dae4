"""Where the time of a configuration's step goes, in a sentence with figures, and what that suggests."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field

from zerotune.trial_lib.messages.measurement import STEP_PARTS
from zerotune.trial_lib.records.candidate import FrozenRecord
from zerotune.trial_lib.records.units import percent, quantity

WORTH_SAYING = 0.15
"""A part of a step that is no computation suggests something from this share on."""

# Smaller parts are counted together.
_SMALL = 0.03
# The profiler's cost changes the shares of steps that it slows down by more.
_SLOWED = 1.5
_WORDS = {
    "compute": "computation",
    "gathering": "waiting for gathered parameters",
    "reducing": "waiting for reduced gradients",
    "exchanging": "waiting for tensors of other ranks",
    "update": "the optimizer",
    "host_update": "the optimizer on the host",
    "transfers": "waiting for copies between host and device",
    "disk": "waiting for NVMe drives",
    "data": "waiting for the data loader",
    "generation": "generation",
    "rewards": "the rewards",
    "launches": "waiting for the host to issue work",
    "other": "other work of the program",
}

AccountBasis = Literal["traced", "foreseen", "none"]


class StepAccount(FrozenRecord):
    name: str  # of the configuration in a sentence, such as `ZeRO 2, micro-batch 24`, or of its arm
    role: Literal["winner", "own", "other", "arm"]  # `winner`, `own`, `other` (measured again as well) or `arm`
    basis: AccountBasis  # whether real ranks were traced, or a plan has foreseen it. `none` if neither.
    trial: int | None = None  # the traced trial. None if there is none.
    seconds: float = 0.0  # of the step: measured without the profiler, or foreseen
    shares: dict[str, float] = Field(default_factory=dict)  # by the names of `STEP_PARTS`, of 1; empty if unknown
    slowed: float = 1.0  # how many times as long the step took under the profiler. 1 if it was not traced.
    failure: str = ""  # why there are no figures, in a sentence. Empty if there are.
    advice: str = ""  # what the shares suggest, in a sentence. Empty if nothing.

    @property
    def sentence(self) -> str:
        if not self.shares:
            return f"Nothing shows where the time of a step goes with {self.name}: {self.failure}"
        is_foreseen = self.basis == "foreseen"
        where = "foreseen, not measured" if is_foreseen else f"traced in trial {self.trial:04d}"
        slowed = f", {self.slowed:.1f} times as long under the profiler" if self.slowed > _SLOWED else ""
        step = f"a step of {quantity(self.seconds, 's')}"
        return f"With {self.name}, {step} is {_listed(self.shares)} ({where}{slowed})."

    @property
    def sentences(self) -> str:
        return " ".join(filter(None, (self.sentence, self.advice)))

    def document(self) -> dict[str, Any]:
        return {"sentence": self.sentence, **self.model_dump(mode="json")}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> "StepAccount":
        """Returns the account that a document was made of. One of another version is a `ValidationError`."""
        return cls.model_validate({name: value for name, value in document.items() if name in cls.model_fields})


def advice_on(
    shares: Mapping[str, float], settings: Mapping[str, Any], device: str, measured: Collection[int] = ()
) -> str:
    """Returns what the largest part beside the computation suggests; empty if none is worth saying. A setting is
    suggested only where DeepSpeed reads it, as in `trial_lib/search/catalogue.py`. ZeRO stages that the study has
    measured to the end are not suggested.
    """
    waits = {part: share for part, share in shares.items() if part != "compute" and share >= WORTH_SAYING}
    if not waits:
        return ""
    part = max(waits, key=lambda name: waits[name])
    zero = settings.get("zero_optimization") or {}
    stage = zero.get("stage") or 0
    said = _advice(part, stage if isinstance(stage, int) else 0, zero, device, measured)
    words = _WORDS[part]
    return f"{words[:1].upper()}{words[1:]} takes {percent(round(waits[part], 2))} of it: {said}"


def _advice(part: str, stage: int, zero: Mapping[str, Any], device: str, measured: Collection[int]) -> str:
    if part == "gathering" and stage == 3:
        lower = [each for each in (2, 1, 0) if each not in measured]
        other = f"stage {lower[0]} if it fits, or " if lower else ""
        more = "" if lower else " The lower stages were measured too."
        keys = "stage3_prefetch_bucket_size or stage3_param_persistence_threshold"
        return f"try {other}a larger {keys}, or a larger micro-batch.{more}"
    if part == "gathering":
        lower_stage = "stage 0 if it fits, or " if stage and 0 not in measured else ""
        return f"try {lower_stage}more accumulation."
    if part == "reducing":
        return f"try {_of_reduction(stage, zero, device)}. Ranks with more work than others show up here too."
    return _ADVICE[part]


def _of_reduction(stage: int, zero: Mapping[str, Any], device: str) -> str:
    if stage == 0:
        return "more accumulation"
    overlaps = zero.get("overlap_comm")
    # DeepSpeed's default is on at stage 3 alone. A CPU has no streams to overlap.
    is_on = stage == 3 if overlaps in (None, "auto") else bool(overlaps)
    overlap = "" if is_on or device == "cpu" else "overlap_comm, "
    return f"more accumulation, {overlap}or a larger reduce_bucket_size"


_ADVICE = {
    "exchanging": "try smaller groups of tensor, sequence or pipeline parallelism, or fewer collectives of the model.",
    "update": "try more accumulation, a fused optimizer, or a stage that divides its states among more ranks.",
    "host_update": "try without offload_optimizer if it fits, more accumulation, or more processor cores for a rank.",
    "transfers": "try pin_memory, or without offload if it fits.",
    "disk": "try pipeline_read and pipeline_write with a buffer_count of 8, or the CPU if the host has room.",
    "data": "try more workers of the data loader (num_workers), pinned memory, or cheaper preparation of samples.",
    "generation": "try shorter completions, more prompts at once, or an engine of its own such as vLLM.",
    "rewards": "try cheaper reward functions, or such as judge many completions at once.",
    "launches": "try a larger micro-batch, or torch.compile.",
    "other": "look at the code outside DeepSpeed's calls, such as logging, metrics or a loader of its own.",
}


def _listed(shares: Mapping[str, float]) -> str:
    large = {part: share for part in STEP_PARTS if (share := shares.get(part, 0.0)) >= _SMALL and part != "other"}
    rest = max(0.0, 1.0 - sum(large.values()))
    ordered = sorted(large.items(), key=lambda each: -each[1])
    words = [f"{percent(round(share, 2))} {_WORDS[part]}" for part, share in ordered]
    if rest >= 0.005:
        words.append(
            f"{percent(round(rest, 2))} {_WORDS['other'] if shares.get('other', 0) >= rest / 2 else 'the rest'}"
        )
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
