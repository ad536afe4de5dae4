"""Prepares a fresh machine, so that its first study need not wait: `python -m flows.prepare`. It has no deadline."""

import subprocess
import sys

from flows.interrupts import interrupts
from flows.servers.prefect_server import is_configured, migrate_own_database
from trial_lib.launch.cold import rank_environment
from trial_lib.launch.processes import bootstrap

OPS = ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder")


def prepare() -> int:
    """Migrates the database of ZeroTune's own Prefect server, and builds DeepSpeed's operators."""
    if not is_configured():
        print("migrating Prefect's database", file=sys.stderr, flush=True)
        migrate_own_database()
    subprocess.run(
        bootstrap.command(sys.executable, "trial_lib.launch.processes.jit_builds", *OPS),
        env=rank_environment(),
        check=True,
    )
    return 0


if __name__ == "__main__":
    interrupts.listen()
    sys.exit(interrupts.run(prepare))
