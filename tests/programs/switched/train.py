"""Trains with switches of its own: an option, an override, a variable and a value in a file, which cost time or not."""

import argparse
import os

import deepspeed
import torch
import torch.nn.functional as F
import yaml

FEATURES, HIDDEN, CLASSES = 64, 512, 8
KERNELS = {"relu": torch.relu, "gelu": F.gelu}

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--twice", action="store_true", help="computes each forward pass twice, and gains nothing")
parser.add_argument("--kernel", choices=KERNELS, default="relu")
parser.add_argument("--config", default="train.yaml")
parser.add_argument("overrides", nargs="*", help="such as model.layers=2")
args = deepspeed.add_config_arguments(parser).parse_args()

with open(args.config) as file:  # noqa: PTH123
    loops = yaml.safe_load(file)["model"]["loops"]
layers = int(dict(override.split("=") for override in args.overrides).get("model.layers", 1))
print(
    f"twice {args.twice} kernel {args.kernel} loops {loops} layers {layers} own {os.environ.get('OWN')} "
    f"threads {torch.get_num_threads()}",
    flush=True,
)

torch.manual_seed(1)
hidden = [torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(layers)]
model = torch.nn.Sequential(torch.nn.Linear(FEATURES, HIDDEN), *hidden, torch.nn.Linear(HIDDEN, CLASSES))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
draws = torch.Generator().manual_seed(7)
for _ in range(400):
    size = engine.train_micro_batch_size_per_gpu()
    inputs = KERNELS[args.kernel](torch.randn(size, FEATURES, generator=draws)).to(engine.device)
    labels = torch.randint(0, CLASSES, (size,), generator=draws).to(engine.device)
    for _ in range(20 * loops if args.twice else 0):
        with torch.no_grad():
            model(inputs)
    engine.backward(F.cross_entropy(engine(inputs), labels))
    engine.step()
