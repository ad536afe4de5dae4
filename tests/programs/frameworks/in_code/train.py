"""A Trainer whose arguments stand in the code."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORDS, LENGTH = 300, 32


def main() -> None:
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        deepspeed="ds_auto.json",
        max_steps=400,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
    )
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=96, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    rows = [{"input_ids": words, "labels": words} for words in torch.randint(WORDS, (8192, LENGTH))]
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows).train()


if __name__ == "__main__":
    main()
