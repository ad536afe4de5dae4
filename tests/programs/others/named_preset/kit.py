"""`python kit.py sft OPTIONS` starts torchrun on another program, which takes the name of a preset for a file."""

import os
import subprocess
import sys

if __name__ == "__main__":
    method, *options = sys.argv[1:]
    ranks = os.environ.get("NPROC_PER_NODE")
    started = ["torchrun", "--nproc_per_node", ranks, "--master_port", "29783"] if ranks else [sys.executable]
    sys.exit(subprocess.run([*started, f"{method}.py", *options]).returncode)
