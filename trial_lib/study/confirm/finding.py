"""What confirmation has found: which configuration trains faster than the user's, how much, and how surely."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from trial_lib.records.candidate import Candidate
from trial_lib.records.frozen_record import FrozenRecord
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.records.units import interval

# A free batch changes the training: less than this is not worth the thought.
_WORTH_SAYING = 1.05

ConfirmationVerdict = Literal["own", "faster", "equal", "slower", "uncompared", "failed", "disagrees"]


class Estimate(FrozenRecord):
    """A geometric mean over fresh processes, with the ends of its interval."""

    value: float
    low: float
    high: float

    @property
    def times(self) -> str:
        """A gain as people read it: `1.83x [1.79, 1.87]`."""
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


class Confirmed(FrozenRecord):
    """One configuration that was measured again.

    Attributes:
        name: for people, such as `z2, micro-batch 24`.
        trials: the numbers of its confirming trials, in their order.
        number: the one of them that measured its median; None where none completed.
        metrics: the median of each metric over those that completed: what training will give.
        value: of the study's metric; None where fewer than two of them completed.
        gain: how many times better than the user's configuration; None where there is nothing to compare.
        clock_gain: the same by the metric itself, where another quantity decides.
        verdict: `own` for the user's configuration, `uncompared` where that gave nothing to compare with.
        reason: why it failed; empty otherwise.
        losses: what its losses say.
    """

    name: str
    trials: tuple[int, ...]
    number: int | None
    metrics: dict[str, float]
    value: Estimate | None = None
    gain: Estimate | None = None
    clock_gain: Estimate | None = None
    verdict: ConfirmationVerdict
    reason: str = ""
    losses: str = ""


class Finding(FrozenRecord):
    """What a study's last step has found.

    Attributes:
        metric: what the study optimises.
        quantity: what was compared, in words.
        rounds: in each of which every contender was measured once, in a fresh process.
        error: probability that any of the intervals leaves out the truth.
        own: the user's configuration; None where it was not measured.
        candidates: the others, best first.
        winner: what to train with; None where nothing could be measured again.
        advice: on the learning rate, where the winner has another global batch; empty otherwise.
        freeing: what a free batch is expected to bring, where the batch was kept and it would be worth it; else empty.
        in_code: what the winner needs of the code, where a trial has stood in for it; else empty.
        left_out: what was not tried any more because two trials had failed alike, a sentence each.
        instead: why the metric is not the one that was asked for; empty where it is.
        left_unmeasured: what the measurement of the user's configuration leaves out; empty where nothing.
        on_devices: what of the devices may have told the trials apart, a sentence each.
    """

    metric: str
    quantity: str
    rounds: int
    error: float
    own: Confirmed | None
    candidates: tuple[Confirmed, ...]
    winner: Confirmed | None
    advice: str = ""
    freeing: str = ""
    in_code: str = ""
    left_out: tuple[str, ...] = ()
    instead: str = ""
    left_unmeasured: str = ""
    on_devices: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        if self.winner is None:
            reasons = [tried.reason for tried in (self.own, *self.candidates) if tried is not None]
            return f"Nothing could be measured a second time. {next(filter(None, reasons), '')}".rstrip()
        if self.winner.verdict == "own":
            return "No configuration is faster than yours beyond the noise."
        if self.winner.gain is None:
            value, unit = self.winner.value, SEARCH_METRICS[self.metric].unit
            level = "" if value is None else f" {interval(value.value, value.low, value.high, unit)}"
            return f"{self.winner.name}:{level}, and nothing to compare with."
        return f"{self.winner.name}: {self.winner.gain.times} your configuration."

    @property
    def lines(self) -> list[str]:
        """How that was found, and what else a person has to know, a sentence each."""
        said = [self.instead] if self.instead else []
        if self.rounds:
            said.append(
                f"Measured in {self.rounds} rounds of fresh processes, all in turn; compared by {self.quantity}; "
                f"the intervals hold all together in {1 - self.error:.0%} of such comparisons."
            )
        if self.winner is not None and self.winner.clock_gain is not None:
            said.append(f"By the wall clock, which varies more: {self.winner.clock_gain.times}.")
        said += [_about(candidate) for candidate in self.candidates if candidate != self.winner]
        if self.winner is not None and self.winner.losses:
            said.append(f"{_capital(self.winner.losses)}.")
        said += self.on_devices
        return [*said, *filter(None, (self.left_unmeasured, self.in_code, self.advice, self.freeing)), *self.left_out]

    def document(self) -> dict[str, Any]:
        """Returns it as JSON, with its sentences."""
        return {"sentence": self.sentence, "notes": self.lines, **self.model_dump(mode="json")}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> "Finding":
        """Returns the finding that a document was made of."""
        return cls.model_validate({name: value for name, value in document.items() if name in cls.model_fields})


def _about(candidate: Confirmed) -> str:
    if candidate.verdict == "failed":
        return f"{candidate.name} did not complete again. {candidate.reason}"
    if candidate.verdict == "disagrees":
        return f"{candidate.name} is not chosen: {candidate.losses}."
    return f"{candidate.name}: {candidate.gain.times if candidate.gain else 'measured as well'}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def name_of(candidate: Candidate) -> str:
    """Returns what people call a candidate, such as `z2, optimizer offload, micro-batch 24`."""
    zero = candidate.knobs.get("zero_optimization") or {}
    words = [] if candidate.zero_stage is None else [f"z{candidate.zero_stage}"]
    for key, word in (("offload_optimizer", "optimizer offload"), ("offload_param", "parameter offload")):
        if (zero.get(key) or {}).get("device", "none") != "none":
            words.append(word)
    words.append(f"micro-batch {candidate.micro_batch_size}")
    if candidate.gradient_accumulation_steps > 1:
        words.append(f"accumulation {candidate.gradient_accumulation_steps}")
    return ", ".join(words)


def partition_advice(zero_stage: int, partitions_its_model: bool) -> str:
    """Returns what a winner needs of code that makes its model within `deepspeed.zero.Init`; empty where nothing.

    Args:
        zero_stage: the winner's.
        partitions_its_model: whether the code does.
    """
    if zero_stage == 3 or not partitions_its_model:
        return ""
    return (
        "The code makes its model within deepspeed.zero.Init, which was off in these trials and is in "
        f"`zerotune train`; elsewhere give it enabled=False at stage {zero_stage}."
    )


def freeing_advice(micro_batch_size: int, factor: float) -> str:
    """Returns what a free batch is expected to bring; empty where that is too little to speak of.

    Args:
        micro_batch_size: the best one with a free batch, as the search's model sees it (samples).
        factor: how many times as many samples per second it is expected to take.
    """
    if factor < _WORTH_SAYING:
        return ""
    return (
        f"With a free batch (--free-batch) about {factor:.2g} times as many samples per second are expected, at "
        f"micro-batch {micro_batch_size}: predicted, not measured, and the training changes with the batch."
    )


def learning_rate_advice(own_batch: int, batch: int) -> str:
    """Returns what to try with the learning rate when the samples of an optimizer step change; empty if they do not.

    DeepSpeed's dynamic batching has both rules (`data_efficiency.data_sampling.dynamic_batching.lr_scaling_method`):
    linear after Goyal et al., Accurate, Large Minibatch SGD (2017), the square root after Krizhevsky, One weird trick
    (2014). You et al. train with LAMB by the square root (2020). Its tutorial for larger batches finds the rate by a
    learning rate range test.
    """
    if own_batch == batch:
        return ""
    factor = batch / own_batch
    return (
        f"The global batch is {batch} and yours {own_batch}: scale the learning rate, by {math.sqrt(factor):.3g} "
        f"(square root, usual with Adam and LAMB) or {factor:.3g} (linear, usual with SGD), the two rules of "
        "DeepSpeed's lr_scaling_method, and try it: https://www.deepspeed.ai/tutorials/lrrt."
    )
