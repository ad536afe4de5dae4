"""A training that forgets its shared memory: a segment that it keeps, one that it closes, one of another process."""

import subprocess
import sys
from multiprocessing.resource_tracker import unregister
from multiprocessing.shared_memory import SharedMemory

import deepspeed
from toy import parse_arguments, small_model, train

BYTES = 1 << 20
ELSEWHERE = f"""
import sys, time
from multiprocessing.resource_tracker import unregister
from multiprocessing.shared_memory import SharedMemory
kept = SharedMemory(sys.argv[1], create=True, size={BYTES})
unregister(kept._name, "shared_memory")
print("made", flush=True)
time.sleep(600)
"""


def forgotten(name: str) -> SharedMemory:
    """Returns a segment that Python does not remove behind this process either."""
    segment = SharedMemory(name, create=True, size=BYTES)
    unregister(segment._name, "shared_memory")
    return segment


def main() -> None:
    args = parse_arguments(name="leak")
    kept = forgotten(f"{args.name}-kept")
    forgotten(f"{args.name}-closed").close()
    command = [sys.executable, "-c", ELSEWHERE, f"{args.name}-elsewhere"]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "made\n"
    model = small_model()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    train(engine, args.steps)
    print(kept.name)


main()
