"""A training that forgets its shared memory: a segment that it keeps, one that it closes, one of another process."""

import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

import deepspeed
from toy import parse_arguments, small_model, train

BYTES = 1 << 20
ELSEWHERE = f"""
import sys, time
from multiprocessing.shared_memory import SharedMemory
kept = SharedMemory(sys.argv[1], create=True, size={BYTES})
print("made", flush=True)
time.sleep(600)
"""


def main() -> None:
    args = parse_arguments(name="leak")
    kept = SharedMemory(f"{args.name}-kept", create=True, size=BYTES)
    SharedMemory(f"{args.name}-closed", create=True, size=BYTES).close()
    command = [sys.executable, "-c", ELSEWHERE, f"{args.name}-elsewhere"]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "made\n"
    model = small_model()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    train(engine, args.steps)
    kept.unlink()


main()
