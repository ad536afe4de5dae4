"""What a confirmation has found, and how it is said."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from zerotune.trial_lib.messages.measurement import AcrossRows
from zerotune.trial_lib.records.candidate import FrozenRecord
from zerotune.trial_lib.records.result import SEARCH_METRICS, as_sentence, without_log
from zerotune.trial_lib.records.units import (
    NONE_CONFIRMED,
    NONE_FASTER,
    NONE_FASTER_ALIKE,
    NONE_FASTER_BEYOND_NOISE,
    NOTHING_CONFIRMED,
    confidence_level,
    duration,
    gain_line,
    interval,
    percent,
)

MOST_ROUNDS = 24  # of a confirmation

# A free batch changes the training: less than this is not worth the thought.
_WORTH_SAYING = 1.05

ConfirmationVerdict = Literal["own", "faster", "equal", "slower", "uncompared", "failed", "disagrees"]


class Estimate(FrozenRecord):
    """A mean over fresh processes, with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def times(self) -> str:
        """A gain in short, such as `1.83x (1.79 to 1.87)`."""
        return f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f})"


class Confirmed(FrozenRecord):
    """One configuration that was measured again."""

    name: str  # its name in a sentence, such as `ZeRO 2, micro-batch 24`
    trials: tuple[int, ...]  # the numbers of its confirming trials, in their order
    number: int | None  # the trial with the median. None if no trial completed.
    metrics: dict[str, float]  # each metric over all completed trials together, as a training has it
    value: Estimate | None = None  # the study's metric. None if fewer than two trials completed.
    # How many times better it is than the user's configuration. None if there is nothing to compare.
    gain: Estimate | None = None
    verdict: ConfirmationVerdict  # `own` for the user's configuration, `uncompared` if that has no measurement
    reason: str = ""  # why it failed. Empty otherwise.
    losses: str = ""  # how its losses compare with those of the user's configuration
    is_compared: bool = True  # whether they could be compared. A freed batch, for example, changes them.


OF_WORTHS = "Apart from the answer's interval, all of these hold in 90 % of studies."


class Worth(FrozenRecord):
    """What some of the winner's changes to the user's configuration are worth, as it was measured."""

    knobs: tuple[str, ...]  # their names. Several were dropped together.
    verdict: Literal["kept", "dropped", "untried"]
    # The speed without them, as a share of the winner's with all its changes. None if it was not measured.
    without: Estimate | None = None
    gain: Estimate | None = None  # over the user's configuration without them
    reason: str = ""  # why they are kept, if the speed is not the reason
    of_search: bool = False  # whether `without` is what the search's readings show, far beyond their noise

    @property
    def name(self) -> str:
        return ", ".join(self.knobs)

    @property
    def times(self) -> Estimate | None:
        """How many times faster the winner is with them than without."""
        share = self.without
        if share is None or not (share.low > 0.0 and share.value > 0.0 and share.high > 0.0):
            return None
        return Estimate(value=1 / share.value, low=1 / share.high, high=1 / share.low)


BEST_WITH_DEEPSPEED = "the best DeepSpeed configuration"
_WITHOUT_DEEPSPEED = {"ddp": "plain DDP", "fsdp2": "FSDP2"}


class PlainTraining(FrozenRecord):
    """The same training without DeepSpeed, measured in the rounds of the confirmation."""

    kind: Literal["ddp", "fsdp2"]
    measured: Confirmed  # its verdict is `uncompared`, `disagrees` or `failed`
    # How many times faster it is than the best configuration with DeepSpeed. None if it was not measured.
    gain: Estimate | None = None
    than: str = BEST_WITH_DEEPSPEED  # what it is compared with
    way: str = ""  # what to change in order to train so, as a clause. Empty if unknown.

    @property
    def is_faster(self) -> bool:
        """Whether it surely is, and trains alike as far as was seen."""
        return self.measured.verdict != "disagrees" and self.gain is not None and self.gain.low > 1.0

    @property
    def comparison(self) -> str:
        """How fast it is, as a clause. Empty if it was not measured."""
        if self.gain is None:
            return ""
        value, ends = f"{self.gain.value:.2f}", f"({self.gain.low:.2f} to {self.gain.high:.2f})"
        name = _WITHOUT_DEEPSPEED[self.kind]
        if self.gain.low > 1.0:
            return f"{name} is {value}x faster than {self.than} {ends}"
        if self.gain.high < 1.0:
            return f"{name} has {value} of the speed of {self.than} {ends}"
        return f"{name} is not surely faster or slower than {self.than}: {value}x {ends}"

    @property
    def line(self) -> str:
        """It as a note on the answer."""
        # Its name begins with words of DeepSpeed's.
        of_batch = "micro-batch" + self.measured.name.rpartition("micro-batch")[2]
        if self.gain is None:
            reason = as_sentence(without_log(self.measured.reason)) or "The rounds were too few."
            return f"{_first_up(_WITHOUT_DEEPSPEED[self.kind])}, {of_batch}, was not measured. {reason}"
        losses = f" {_first_up(self.measured.losses)}." if self.measured.losses else ""
        other = " So it is another training." if self.measured.verdict == "disagrees" else ""
        way = f" To train so: {self.way}. This edit was not run: the trials told the framework." if self.way else ""
        return f"{_first_up(self.comparison)}, with {of_batch}.{losses}{other}{way}"


def _first_up(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


class Finding(FrozenRecord):
    """The result of a study's last step."""

    metric: str  # the metric that the study optimises
    quantity: str  # the quantity that was compared: the metric
    rounds: int  # how many rounds were run. In each one every contender was measured once, in a fresh process.
    error: float  # the probability that any of the intervals misses the true value
    own: Confirmed | None  # the user's configuration. None if it was not measured.
    candidates: tuple[Confirmed, ...]  # the others, best first
    winner: Confirmed | None  # the configuration to train with. None if no configuration could be measured again.
    # If the rounds did not tell whether the best candidate is faster: so many more probably would. 0 if not even the
    # most that a confirmation may have would, and otherwise.
    more_rounds: int = 0
    varies: float = 0.0  # The gain varies by this share from round to round, if not even those rounds would tell,
    varies_at_most: float = 0.0  # and would have to vary by no more than this one.
    round_seconds: float = 0.0  # what one of them takes
    advice: str = ""  # on the learning rate and on the code, if the winner has another batch. Empty otherwise.
    # The expected gain of a free batch, if the batch was kept and the gain is worth it. Empty otherwise.
    freeing: str = ""
    in_code: str = ""  # a change that the winner needs in the code. Empty if none.
    # Configurations that were not tried because two trials had failed alike, a sentence each
    left_out: tuple[str, ...] = ()
    instead: str = ""  # why the metric is not the requested one. Empty if it is.
    left_unmeasured: str = ""  # what the measurement of the user's configuration leaves out. Empty if nothing.
    others: str = ""  # how many of the other configurations could not be measured, and why. Empty if all were.
    published: str = ""  # what others got for trainings like this. Empty if nothing is known.
    of_data: str = ""  # on the samples that the trials counted. Empty if the user's configuration was not measured.
    on_devices: tuple[str, ...] = ()  # differences between devices that may have influenced the trials, a sentence each
    # What the winner's changes are worth, the kept ones first. Empty if they were not weighed.
    worths: tuple[Worth, ...] = ()
    weighed_in: int = 0  # trials, beside the rounds
    unweighed: str = ""  # why not everything was tried. Empty if it was.
    beside: tuple[PlainTraining, ...] = ()  # the training without DeepSpeed, if the user has asked for it
    without: str = ""  # how to learn whether it is faster without DeepSpeed. Empty if DeepSpeed cannot be left out.

    @property
    def sentence(self) -> str:
        faster = max((one for one in self.beside if one.is_faster), key=_gain_of, default=None)
        return self._of_deepspeed if faster is None else f"{self._of_deepspeed} {_first_up(faster.comparison)}."

    @property
    def _of_deepspeed(self) -> str:
        if self.winner is None:
            is_own = self.own is not None and self.own.verdict == "own"
            return NONE_CONFIRMED.format(len(self.candidates)) if is_own else NOTHING_CONFIRMED
        if self.winner.verdict == "own":
            verdicts = {candidate.verdict for candidate in self.candidates}
            none = NONE_FASTER_BEYOND_NOISE if "equal" in verdicts else NONE_FASTER
            none = NONE_FASTER_ALIKE if "disagrees" in verdicts else none
            return f"{none} {self._more}".rstrip()
        if self.winner.gain is None:
            value, unit, level = self.winner.value, SEARCH_METRICS[self.metric].unit, confidence_level(self.error)
            value_shown = "" if value is None else f": {interval(value.value, value.low, value.high, unit, level)}"
            return f"{self.winner.name}{value_shown}. There is no measurement of your configuration to compare it with."
        gain = self.winner.gain
        line = gain_line(gain.value, self.winner.name, (gain.low, gain.high), self.error)
        return line if self.winner.is_compared else f"{line}. Its losses were not compared with yours."

    @property
    def _more(self) -> str:
        seems = next((f"{one.gain.value:.2f}x" for one in self.candidates if one.gain is not None), "")
        if self.varies:
            return (
                f"Not even the {MOST_ROUNDS} rounds that a confirmation may have would surely settle it. The gain "
                f"varies by {percent(self.varies)} from round to round. If the best is {seems} as fast, as it seems, "
                f"the machine has to be so quiet that it varies by {percent(self.varies_at_most)}."
            )
        if not self.more_rounds:
            return ""
        rounds = "round" if self.more_rounds == 1 else "rounds"
        return (
            f"If the best is {seems} as fast, as it seems, {self.more_rounds} more {rounds} of about "
            f"{duration(max(self.round_seconds, 1.0))} each would probably settle it."
        )

    @property
    def _tokens(self) -> str:
        measured = [one.metrics.get("tokens_per_second") for one in (self.winner, self.own) if one is not None]
        if len(measured) < 2 or None in measured:
            return ""
        winner, own = (f"{tokens:,.0f} tokens/s" for tokens in measured)
        return f"Your configuration trains {own}." + (
            "" if self.winner == self.own else f" The winner trains {winner}."
        )

    @property
    def failure(self) -> str:
        """Why nothing was confirmed, in the words of the first trial that failed. Empty if that is not known."""
        reasons = [tried.reason for tried in (self.own, *self.candidates) if tried is not None]
        return as_sentence(without_log(next(filter(None, reasons), "")))

    @property
    def lines(self) -> list[str]:
        """Notes on the answer: how it was measured, and what else a person needs to know, a sentence each."""
        lines = [self.instead] if self.instead else []
        if self.rounds:
            lines.append(
                f"Measured in {self.rounds} rounds of fresh processes, in turn, and compared by {self.quantity}. In "
                f"{percent(1 - self.error)} of such comparisons all intervals contain the true values."
            )
        lines += [one.line for one in self.beside]
        lines += [_about(candidate) for candidate in self.candidates if candidate != self.winner]
        if self.winner is not None and self.winner.losses:
            lines.append(f"{_first_up(self.winner.losses)}.")
        lines += [*self._of_worths(), *self.on_devices]
        of_answer = (self.of_data, self._tokens, self.published, self.left_unmeasured, self.in_code, self.advice)
        return [*lines, *filter(None, (*of_answer, self.freeing, self.others, self.without)), *self.left_out]

    def _of_worths(self) -> Iterator[str]:
        if self.weighed_in:
            trials = f"{self.weighed_in} further trials"
            yield f"{trials} measured the winner without some of its changes, beside the whole. {OF_WORTHS}"
        for worth in self.worths:
            are = "is" if len(worth.knobs) == 1 else "are together"
            if worth.verdict == "dropped" and worth.without is not None:
                yield (
                    f"Left as you have it, because the gain holds without: {worth.name} "
                    f"({worth.without.times} of the speed with it)."
                )
            elif worth.verdict == "kept":
                holds = f"kept: {worth.reason}" if worth.times is None or worth.reason else f"worth {worth.times.times}"
                if worth.times is not None and not worth.reason and worth.times.low <= 1.0:
                    holds = f"kept, because the readings do not tell whether the gain needs it ({worth.times.times})"
                if worth.of_search and worth.times is not None:
                    holds = f"worth at least {worth.times.low:.2f}x by the readings of the search"
                yield f"Of its changes, {worth.name} {are} {holds.rstrip('.')}."
        if self.unweighed:
            untried = ", ".join(worth.name for worth in self.worths if worth.verdict == "untried")
            yield f"Not tried without {untried or 'more at once'}: {self.unweighed.rstrip('.')}."

    def document(self) -> dict[str, Any]:
        return {"sentence": self.sentence, "notes": self.lines, **self.model_dump(mode="json")}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> "Finding":
        return cls.model_validate({name: value for name, value in document.items() if name in cls.model_fields})


def _gain_of(beside: PlainTraining) -> float:
    return 0.0 if beside.gain is None else beside.gain.value


def _about(candidate: Confirmed) -> str:
    if candidate.verdict == "failed":
        return f"{candidate.name} did not complete again. {candidate.reason}"
    if candidate.verdict == "disagrees":
        return f"{candidate.name} is not chosen: {candidate.losses}."
    gain = candidate.gain.times if candidate.gain else "measured as well"
    return f"{candidate.name}: {gain}."


def partition_advice(zero_stage: int, partitions_its_model: bool) -> str:
    """What a winner needs of code that makes its model within `deepspeed.zero.Init`; empty where nothing."""
    if zero_stage == 3 or not partitions_its_model:
        return ""
    return (
        "The code makes its model within deepspeed.zero.Init, which was off in these trials and is in "
        f"`zerotune train`; elsewhere give it enabled=False at stage {zero_stage}."
    )


def freeing_advice(micro_batch_size: int, factor: float) -> str:
    """What a free batch is expected to bring; empty where that is too little to speak of.

    `factor` is how many times as many samples per second it is expected to take.
    """
    if factor < _WORTH_SAYING:
        return ""
    return (
        f"With a free batch (--free-batch) about {factor:.2g} times as many samples per second are expected, at "
        f"micro-batch {micro_batch_size}: predicted, not measured, and the training changes with the batch."
    )


def micro_batch_advice(own: int, winner: int, across: AcrossRows | None = None) -> str:
    """What another micro-batch changes in a training, by the profile's test; empty if it is the same."""
    if own == winner:
        return ""
    changed, page = f"The micro-batch is {winner} and yours {own}.", "docs/tuning.md, What depends on the micro-batch"
    if across is not None and across.why:
        return f"{changed} {across.why}"
    if across is not None and across.kind == "unequal":
        return (
            f"{changed} The loss is a mean over the tokens, or other parts, of a micro-batch, whose numbers differ. So "
            f"their weights depend on the micro-batch, less in a larger one ({page})."
        )
    if across is not None and not across.undecided:
        more = " A mean over unequal numbers that the code computes would not show." if across.is_outside else ""
        return (
            f"{changed} On one micro-batch of yours, no layer's output and no loss was found to depend on several "
            f"samples at once.{more} Random draws and rounding may still differ ({page})."
        )
    why = "" if across is None else f" The test of that is not complete: {across.undecided}."
    return (
        f"{changed} Whatever depends on it trains differently, such as BatchNorm and losses across the samples of a "
        f"micro-batch ({page}).{why}"
    )


def learning_rate_advice(own_batch: int, batch: int) -> str:
    """What to try with the learning rate when the samples of an optimizer step change; empty if they do not.

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
        "DeepSpeed's lr_scaling_method, and try it: https://www.deepspeed.ai/tutorials/lrrt. What the program counts "
        f"in steps (warm-up, decay, evaluation, an epoch's end) then takes {factor:.3g} times the samples. "
        "Compare its losses with yours at equal samples seen: here they were not compared."
    )
