"""Trains a small GPT-2 by the Hugging Face Trainer, which reports by a callback; written for the Core API."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

import zerotune as det
from model import LENGTH, VOCABULARY, Sentences
from zerotune import dsat
from zerotune.trial_lib.training.huggingface import DetCallback


def collate(sentences):
    tokens = torch.stack(sentences)
    return {"input_ids": tokens, "labels": tokens}


def main(core_context, training_args):
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=training_args,
        train_dataset=Sentences(),
        eval_dataset=Sentences(4),
        data_collator=collate,
    )
    det_callback = DetCallback(core_context, training_args, filter_metrics=["loss"], user_data={"tokens": VOCABULARY})
    trainer.add_callback(det_callback)
    with dsat.dsat_reporting_context(core_context, op=det_callback.current_op):
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)


if __name__ == "__main__":
    info = det.get_cluster_info()
    parser = HfArgumentParser(TrainingArguments)
    args = dsat.get_hf_args_with_overwrites(sys.argv[1:], info.trial.hparams if info else {})
    (training_args,) = parser.parse_args_into_dataclasses(args, look_for_args_file=False)
    distributed = det.core.DistributedContext.from_deepspeed()
    with det.core.init(distributed=distributed) as core_context:
        main(core_context, training_args)
