"""The search methods, one record each, with their settings. Other code reads the records and asks for none by name.

A record names the method's class. The class is imported when a search begins, so that the command line starts fast.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from zerotune.trial_lib.records.candidate import FrozenRecord, NameOf
from zerotune.trial_lib.records.result import MetricName
from zerotune.trial_lib.search.knobs import ZeroStage

_ASCENDING = AfterValidator(lambda stages: tuple(sorted(set(stages))))
ZeroStages = Annotated[tuple[ZeroStage, ...], Field(min_length=1), _ASCENDING]


class SearchSettings(FrozenRecord):
    """The settings of every search.

    Attributes:
        max_trials: trials of the study's search, including the profile trial. A search proposes one fewer.
        zero_stages: ZeRO stages that may be used.
        metric: the metric to optimise, a name of `SEARCH_METRICS`.
        seed: of every random choice.
        concurrency: trials that may run at once.
        max_micro_batch: the largest micro-batch size (samples) that may be tried; None for no limit but memory.
    """

    max_trials: PositiveInt = 50
    zero_stages: ZeroStages = (1, 2, 3)
    metric: MetricName = "FLOPS_per_gpu"
    seed: int = 42
    concurrency: PositiveInt = 1
    max_micro_batch: PositiveInt | None = None


class AdaptiveSettings(SearchSettings):
    """The settings of `adaptive`.

    Attributes:
        zero_stages: ZeRO stages that may be used.
        divisible_by: every micro-batch size (samples) is a multiple of it.
        memory_headroom: share of a device's memory that is to stay free.
        min_gain: end the search when no trial is expected to gain this share, and no value new to its arm half of it.
    """

    zero_stages: ZeroStages = (0, 1, 2, 3)
    divisible_by: PositiveInt = 1
    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.05
    min_gain: NonNegativeFloat = 0.001


class BinarySettings(SearchSettings):
    """The settings of `binary`.

    Attributes:
        search_range_factor: try micro-batches up to this multiple of the first guess of the largest that fits.
    """

    search_range_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class AshaSettings(BinarySettings):
    """The settings of `asha`.

    Rung r, from 0, is complete after `min_binary_search_trials` x `divisor` ^ (`asha_early_stopping` + r) trials.

    Attributes:
        max_rungs: use at most this many rungs. No configuration is promoted from the top one.
        min_binary_search_trials: complete the lowest rung of a configuration after this many trials, without early
            stopping.
        asha_early_stopping: set the early-stopping rate of the paper. Each step up multiplies the trials of every rung
            by the divisor.
        divisor: promote one in this many configurations to the next rung. The paper calls it the reduction factor.
    """

    max_rungs: PositiveInt = 5
    min_binary_search_trials: PositiveInt = 3
    asha_early_stopping: NonNegativeInt = 0
    divisor: Annotated[int, Field(ge=2)] = 2


class RandomSettings(SearchSettings):
    """The settings of `random`.

    Attributes:
        trials_per_random_config: run at most this many trials of one configuration.
        early_stopping: end the search after this many trials in a row without a new best, once there is a best.
            Default: never.
    """

    trials_per_random_config: PositiveInt = 5
    early_stopping: PositiveInt | None = None


@dataclass(frozen=True)
class Method:
    name: str  # as in `--method` and a study's record
    help: str  # for `--help`; its first sentence has at most 45 characters and is imperative
    search: str  # its class, as `module:Class`
    settings: type[SearchSettings] = SearchSettings  # the class of its settings
    has_catalogue: bool = False  # whether it searches the catalogue's knobs, or else those of dsat
    has_batch_policy: bool = False  # whether it keeps to a global batch, to divisors and to a memory headroom
    ends_hopeless_trials: bool = False  # whether a trial may end before it is measured because it cannot win any more
    # Whether it ends with one winner, which is measured again beside the user's configuration. Else its answer is the
    # table of its trials, and it has a command of its own.
    confirms_winner: bool = True

    @property
    def stages(self) -> tuple[ZeroStage, ...]:
        stages: tuple[ZeroStage, ...] = self.settings.model_fields["zero_stages"].default
        return stages

    def load(self) -> Any:
        """Its class, a subclass of `Search`."""
        module, _, name = self.search.partition(":")
        return getattr(import_module(module), name)


METHODS = {
    method.name: method
    for method in (
        Method(
            "adaptive",
            "Race what fits, then tune the best further. The search stops when little is left to gain.",
            "zerotune.trial_lib.search.adaptive:AdaptiveSearch",
            AdaptiveSettings,
            has_catalogue=True,
            has_batch_policy=True,
            ends_hopeless_trials=True,
        ),
        Method(
            "asha",
            "Promote random configurations that do well. Their micro-batch sizes are searched, and the better ones get "
            "more trials.",
            "zerotune.trial_lib.search.dsat:AshaSearch",
            AshaSettings,
        ),
        Method(
            "binary",
            "Bisect micro-batches of random configurations.",
            "zerotune.trial_lib.search.dsat:BinarySearch",
            BinarySettings,
        ),
        Method(
            "random",
            "Try random configurations. The search stops those early that cannot win.",
            "zerotune.trial_lib.search.dsat:RandomSearch",
            RandomSettings,
        ),
        Method(
            "micro_batch",
            "Find the largest and fastest micro-batch. All trials have one configuration otherwise.",
            "zerotune.trial_lib.search.micro_batch:MicroBatchSearch",
            confirms_winner=False,
        ),
    )
}

MethodName = Annotated[str, NameOf("method", METHODS)]
