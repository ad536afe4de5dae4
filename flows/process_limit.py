"""The limit on processes and threads of a user (`ulimit -u`) or of a container, when a study reaches it."""

import errno

OUT_OF_PROCESSES = (
    "this user or container has reached its limit of processes and threads. Raise the limit (`ulimit -u`, or "
    "`--pids-limit` of a container), or end some."
)


def is_out_of_processes(error: BaseException) -> bool:
    """Returns whether an error, or one that caused it, means that no further process or thread can start."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError) and "can't start new thread" in str(seen):
            return True
        if isinstance(seen, OSError) and seen.errno == errno.EAGAIN:
            return True
        seen = seen.__cause__ or seen.__context__
    return False
