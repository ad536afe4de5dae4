"""The search methods, one record each. Other code reads the records and asks for no method by name.

A record names the method's class. The class is imported when a search begins, so that the command line starts fast.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

from trial_lib.records.candidate import NameOf
from trial_lib.search.knobs import ZeroStage
from trial_lib.search.settings import AdaptiveSettings, AshaSettings, BinarySettings, RandomSettings, SearchSettings

if TYPE_CHECKING:
    from trial_lib.search.base import Search


@dataclass(frozen=True)
class Method:
    """A search method."""

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
    loaded_ahead: tuple[str, ...] = ()  # modules to import while a trial runs, as its first ask needs them

    @property
    def stages(self) -> tuple[ZeroStage, ...]:
        stages: tuple[ZeroStage, ...] = self.settings.model_fields["zero_stages"].default
        return stages

    def load(self) -> "type[Search]":
        module, _, name = self.search.partition(":")
        found: type[Search] = getattr(import_module(module), name)
        return found


METHODS = {
    method.name: method
    for method in (
        Method(
            "adaptive",
            "Race what fits, then tune the best further. The search stops when little is left to gain.",
            "trial_lib.search.adaptive:AdaptiveSearch",
            AdaptiveSettings,
            has_catalogue=True,
            has_batch_policy=True,
            ends_hopeless_trials=True,
            loaded_ahead=("optuna", "numpy.random"),
        ),
        Method(
            "asha",
            "Promote random configurations that do well. Their micro-batch sizes are searched, and the better ones get "
            "more trials.",
            "trial_lib.search.dsat:AshaSearch",
            AshaSettings,
        ),
        Method(
            "binary",
            "Bisect micro-batches of random configurations.",
            "trial_lib.search.dsat:BinarySearch",
            BinarySettings,
        ),
        Method(
            "random",
            "Try random configurations. The search stops those early that cannot win.",
            "trial_lib.search.dsat:RandomSearch",
            RandomSettings,
        ),
        Method(
            "micro_batch",
            "Find the largest and fastest micro-batch. All trials have one configuration otherwise.",
            "trial_lib.search.micro_batch:MicroBatchSearch",
            confirms_winner=False,
        ),
    )
}

MethodName = Annotated[str, NameOf("method", METHODS)]
