"""A training without a word of DeepSpeed, which is resumed by its own means: it counts its steps in a file."""

import argparse
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config", type=Path)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--step_seconds", type=float, default=0.0)
parser.add_argument("--crashes", type=int, default=0, help="how often it crashes, once a start")
parser.add_argument("--vanish", type=int, default=-1, help="the rank that leaves without a word, with exit status 0")
args = parser.parse_args()

rank = os.environ["RANK"]
done, crashed = Path(f"steps{rank}.txt"), Path("crashed.txt")
config = json.loads(args.deepspeed_config.read_text())
print(f"pid {os.getpid()} of {args.deepspeed_config} tuned {'autotuning' in config}", flush=True)
first = int(done.read_text()) if done.exists() else 0
for step in range(first, args.steps):
    time.sleep(args.step_seconds)
    done.write_text(str(step + 1))
    print(f"step {step + 1} at micro-batch {config['train_micro_batch_size_per_gpu']}", flush=True)
    before = int(crashed.read_text()) if crashed.exists() else 0
    if before < args.crashes:
        crashed.write_text(str(before + 1))
        raise ValueError(f"the disk with shard {before + 1} is away")
if args.vanish == int(rank):
    os._exit(0)
