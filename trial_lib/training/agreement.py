"""Work that one rank does for all, and files that all ranks must see. Every rank returns, or every rank raises."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trial_lib.training.distributed import DistributedContext
from trial_lib.training.invalid_trial import InvalidTrialError

_Result = TypeVar("_Result")


def on_rank_0(distributed: DistributedContext, work: Callable[[], _Result]) -> _Result:
    """Does something on rank 0 while the others wait. Call it on all ranks.

    Returns:
        The result of `work`, on every rank.

    Raises:
        OSError: `work` raised it; on every rank, with the same words.
        InvalidTrialError: likewise.
    """
    result: _Result | None = None
    failure: OSError | InvalidTrialError | None = None
    if distributed.rank == 0:
        try:
            result = work()
        except (OSError, InvalidTrialError) as error:
            failure = error
    told = None if failure is None else (isinstance(failure, OSError), str(failure))
    agreed: _Result
    agreed, problem = distributed.broadcast((result, told))
    if problem is not None:
        of_the_system, words = problem
        raise (OSError if of_the_system else InvalidTrialError)(words) from failure
    return agreed


def must_be_seen(distributed: DistributedContext, folder: Path) -> None:
    """Checks that all ranks see a folder that rank 0 has made. Call it on all ranks.

    Raises:
        OSError: one does not; on every rank.
    """
    sees = distributed.allgather(folder.is_dir())
    if not all(sees):
        raise OSError(
            f"Rank {sees.index(False)} does not see the folder {folder}, which rank 0 does: checkpoints need a "
            "folder on a file system that all hosts share."
        )
