"""Prints what it finds itself in, as one line of JSON, then trains."""

import json
import os
import sys
from pathlib import Path

import deepspeed
from toy import parse_arguments, small_model, train

args = parse_arguments()
found = {
    "argv": sys.argv,
    "path": sys.path,
    "cwd": str(Path.cwd()),
    "environment": dict(os.environ),
    "cores": sorted(os.sched_getaffinity(0)),
    "modules": sorted(sys.modules),
    "files": {number: str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)},
    "session": os.getsid(0),
    "name": __name__,
}
print("found " + json.dumps(found), flush=True)
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
train(engine, args.steps)
