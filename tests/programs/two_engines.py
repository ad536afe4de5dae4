"""Trains two models in turn, the second one half as often."""

import deepspeed
from toy import parse_arguments, small_model, train

args = parse_arguments()
engines = []
for _ in range(2):
    model = small_model()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    engines.append(engine)
while True:
    train(engines[0], 2)
    train(engines[1], 1)
