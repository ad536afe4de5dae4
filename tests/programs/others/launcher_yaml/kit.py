"""`python kit.py train recipe.yaml` starts torchrun on this very file, as kits for fine-tuning do."""

import os
import subprocess
import sys
from typing import Any

WORDS, LENGTH = 128, 24


def train(recipe: str) -> None:
    """What each rank does: its options are all in the recipe."""
    import torch
    from transformers import (
        HfArgumentParser,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class SaysItsBatch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0:
                engine = trainer.deepspeed
                batch = (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
                print("\nengine", *batch, engine.train_batch_size(), flush=True)

    (arguments,) = HfArgumentParser(TrainingArguments).parse_yaml_file(recipe)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    starts = (torch.arange(LENGTH) + row for row in range(1200))
    rows = [{"input_ids": words % WORDS, "labels": words % WORDS} for words in starts]
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[SaysItsBatch()])
    trainer.train()


def start(words: list[str]) -> int:
    ranks = os.environ.get("NPROC_PER_NODE", "1")
    command = ["torchrun", "--nproc_per_node", ranks, "--master_port", "29781", __file__, *words]
    return subprocess.run(command, env={**os.environ, "IS_A_RANK": "1"}).returncode


if os.environ.get("IS_A_RANK") == "1":
    train(sys.argv[1])
elif sys.argv[1:2] == ["train"]:
    sys.exit(start(sys.argv[2:]))
else:
    sys.exit("usage: python kit.py train RECIPE")
