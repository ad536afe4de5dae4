"""A training loop of its own with the Core API: the experiment says how long, keeps metrics and checkpoints.

By hand it runs as it is, too: `deepspeed core_api.py --deepspeed_config ds_config.json --steps 30`.
"""

import argparse
import logging
import os

import deepspeed
import numpy as np
import torch
from stopwatch import Stopwatch

import zerotune as det
from model import LanguageModel, Sentences
from zerotune import dsat


def validate(engine, held_out):
    engine.eval()
    with torch.no_grad():
        loss = engine(held_out.to(engine.device)).item()
    engine.train()
    return {"validation_loss": loss}


def main(core_context, hparams, latest_checkpoint, max_length):
    is_chief = core_context.distributed.rank == 0
    deepspeed.init_distributed()
    model = LanguageModel()
    engine, _, trainloader, _ = deepspeed.initialize(
        model=model,
        model_parameters=filter(lambda parameter: parameter.requires_grad, model.parameters()),
        training_data=Sentences(),
        config=dsat.get_ds_config_from_hparams(hparams),
    )
    held_out = torch.stack([Sentences()[-1 - index] for index in range(4)])

    steps_completed = 0
    if latest_checkpoint is not None:
        with core_context.checkpoint.restore_path(storage_id=latest_checkpoint) as path:
            _, state = engine.load_checkpoint(path)
        steps_completed = state["steps_completed"]
        print(f"resumes after {steps_completed} steps", flush=True)

    samples = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    stopwatch = Stopwatch()
    local_losses = []
    for op in core_context.searcher.operations():
        length = max_length or op.length
        while steps_completed < length:
            for data in trainloader:
                with dsat.dsat_reporting_context(core_context, op):
                    loss = engine(data.to(engine.device))
                    engine.backward(loss)
                    is_step = engine.is_gradient_accumulation_boundary()
                    engine.step()
                local_losses.append(loss.item())
                if not is_step:
                    continue
                steps_completed += 1
                stopwatch.step(samples)
                if steps_completed % hparams["metric_reporting_rate"] == 0:
                    gathered = core_context.distributed.gather(np.mean(local_losses))
                    local_losses = []
                    if is_chief:
                        metrics = {"loss": np.mean(gathered)}
                        core_context.train.report_training_metrics(steps_completed=steps_completed, metrics=metrics)
                        op.report_progress(steps_completed)
                if steps_completed % hparams["checkpoint_rate"] == 0 or steps_completed == length:
                    metrics = validate(engine, held_out)
                    if is_chief:
                        core_context.train.report_validation_metrics(steps_completed=steps_completed, metrics=metrics)
                    metadata = {"steps_completed": steps_completed}
                    with core_context.checkpoint.store_path(metadata=metadata, shard=True) as (path, _):
                        engine.save_checkpoint(path, client_state=metadata)
                    if core_context.preempt.should_preempt():
                        return
                if steps_completed == length:
                    if is_chief:
                        op.report_completed(metrics["validation_loss"])
                    break
    stopwatch.report()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", default="ds_config.json")
    parser.add_argument("--steps", type=int, help="optimizer steps; by default what the experiment says")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    args = parser.parse_args()
    info = det.get_cluster_info()
    hparams = {"deepspeed_config": args.deepspeed_config, "metric_reporting_rate": 10, "checkpoint_rate": 50}
    if info is not None:
        hparams |= info.trial.hparams
    distributed = det.core.DistributedContext.from_deepspeed()
    with det.core.init(distributed=distributed) as core_context:
        main(core_context, hparams, info.latest_checkpoint if info else None, args.steps)
