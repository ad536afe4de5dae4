"""Has a child in a session of its own, and a grandchild that nobody waits for; trains, or hangs where told to."""

import os
import subprocess
import sys
import time

import deepspeed
from toy import parse_arguments, small_model, train

args = parse_arguments(hang="")
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
daemon = "import subprocess; print('pid', subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
subprocess.run([sys.executable, "-c", daemon], check=True, stdin=subprocess.DEVNULL)
print(f"pid {os.getpid()}\npid {child.pid}", flush=True)
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
train(engine, 2)
print("ready", flush=True)
while args.hang == "sleep":
    time.sleep(1)
while args.hang == "spin":
    pass
train(engine, args.steps)
