"""The names of a study's candidates, for tables, Prefect and MLflow. Candidates that differ have different names."""

from typing import Any

from trial_lib.command.switches import is_switch
from trial_lib.records.candidate import Candidate
from trial_lib.space.catalogue import KNOBS, is_coarse
from trial_lib.space.knobs import STAGE, coarse_word, leaves

_UNITS = ((10**9, "G"), (10**6, "M"), (10**3, "k"))


class CandidateNames:
    """Names the candidates of one study, in the order of their trials.

    A name has the ZeRO stage, the coarse knobs that are on, the program's switches, and the micro-batch. Most
    candidates have the same fine knobs. So a name shows only the fine knobs that differ from those of the first
    candidate with the same coarse knobs.

    Example:
        >>> from trial_lib.records.candidate import Candidate
        >>> names = CandidateNames()
        >>> for overlap in (True, False):
        ...     zero = {"stage": 2, "overlap_comm": overlap}
        ...     print(names.of(Candidate(knobs={"zero_optimization": zero}, micro_batch_size=16)))
        z2-mbs16
        z2-mbs16-no-overlap
    """

    def __init__(self) -> None:
        self._first: dict[str, dict[str, Any]] = {}

    def of(self, candidate: Candidate) -> str:
        """Returns the name of a candidate. Call it for every candidate, in the order of the trials."""
        settings = dict(leaves(candidate.knobs))
        coarse = [coarse_word(path, value) for path, value in settings.items() if path != STAGE and _is_of_arm(path)]
        stage = [] if candidate.zero_stage is None else [f"z{candidate.zero_stage}"]
        arm = "-".join([*stage, *sorted(filter(None, coarse))])
        fine = {path: value for path, value in settings.items() if not _is_of_arm(path)}
        first = self._first.setdefault(arm, fine)
        paths = [path for path in dict.fromkeys([*first, *fine]) if first.get(path) != fine.get(path)]
        words = [_word(path, fine.get(path)) for path in paths]
        return "-".join(filter(None, [arm, f"mbs{candidate.micro_batch_size}", *words]))


def _is_of_arm(path: str) -> bool:
    return is_coarse(path) or is_switch(path)


def _word(path: str, value: Any) -> str:
    known = KNOBS.get(path)
    word = known.word if known is not None and known.word else path.rpartition(".")[2]
    if isinstance(value, bool):
        return word if value else f"no-{word}"
    return f"{word}={'unset' if value is None else _short(value)}"


def _short(value: Any) -> str:
    """Returns a value, with a unit if that loses nothing: `50M` for 50000000."""
    if isinstance(value, list):
        return "+".join(map(str, value))
    if isinstance(value, int):
        for size, unit in _UNITS:
            if value >= size and value % size == 0:
                return f"{value // size}{unit}"
    return str(value)
