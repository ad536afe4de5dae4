"""A limit on processes and threads, by `ulimit -u` or a container's, that leaves no room for a study."""

import errno

OUT_OF_PROCESSES = (
    "this user, or container, may start no more processes or threads. Raise the limit (`ulimit -u`, or a container's "
    "`--pids-limit`), or end some."
)


def is_out_of_processes(error: BaseException) -> bool:
    """Returns whether an error, or what it came of, says that there is no room for another process or thread."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError) and "can't start new thread" in str(seen):
            return True
        if isinstance(seen, OSError) and seen.errno == errno.EAGAIN:
            return True
        seen = seen.__cause__ or seen.__context__
    return False
