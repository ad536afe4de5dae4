"""Trains the class `Tiny` by a Trainer, as scripts do that build their trial themselves."""

import argparse

import zerotune as det
from model_def import Tiny

parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int)
parser.add_argument("--config", default="ds_config.json")
args = parser.parse_args()
with det.init(hparams={"deepspeed_config": args.config}) as context:
    trainer = det.Trainer(Tiny(context), context)
    trainer.fit(
        max_length=None if args.batches is None else det.Batch(args.batches),
        validation_period=det.Batch(2),
        reporting_period=det.Batch(1),
        checkpoint_policy="all",
    )
print("> batches of", context.get_train_micro_batch_size_per_gpu(), "times", context.get_num_micro_batches_per_slot())
