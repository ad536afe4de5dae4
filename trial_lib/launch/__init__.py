"""A candidate becomes processes, and processes become an outcome.

    driver ── keeper ── guard ── rank 0, rank 1, ...      cold: the guard starts fresh interpreters
    driver ── fork server ── keeper ── guard ── ranks     warm: all are forks of a primed interpreter

Every trial has a guard of its own. It is the ranks' subreaper, so that even a process in a session of its own stays its
descendant, and it holds one end of a socket whose other end only the driver has: when that closes, for whatever
reason, the guard kills all its descendants. When the guard itself is killed, its keeper does that.
"""
