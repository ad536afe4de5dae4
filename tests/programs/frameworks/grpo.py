"""Trains a small Llama by TRL's GRPO: it generates completions of prompts, a function judges them, and it learns."""

import random

from datasets import Dataset
from make_model import text
from transformers import AutoTokenizer, HfArgumentParser, LlamaConfig, LlamaForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer


def variety(completions: list[str], **_: object) -> list[float]:
    """Rewards different characters."""
    return [len(set(each)) / max(1, len(each)) for each in completions]


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    random.seed(0)
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(LlamaConfig.from_pretrained("tiny")),
        reward_funcs=variety,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [text(5, 5) for _ in range(2000)]}),
        processing_class=AutoTokenizer.from_pretrained("tiny"),
    )
    trainer.train()
