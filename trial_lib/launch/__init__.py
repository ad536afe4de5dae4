"""A candidate becomes processes, and processes become an outcome.

    driver ── watchdog ── guard ── rank 0, rank 1, ...      cold: the guard starts fresh interpreters
    driver ── fork server ── watchdog ── guard ── ranks     warm: all are forks of a primed interpreter

Every trial has its own guard. The guard is the subreaper of the ranks, so even a process in a session of its own stays
its descendant. The guard has one end of a socket, and only the driver has the other end. When that end closes, for any
reason, the guard kills all its descendants. If the guard is killed, its watchdog does so.
"""
