"""Fine-tunes a small GPT-2 by LoRA with the Trainer: `deepspeed lora.py --deepspeed ds_auto.json --max_steps 30`."""

import torch
from peft import LoraConfig, get_peft_model
from trainer import StopwatchCallback, collate
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

from model import LENGTH, VOCABULARY, Sentences


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    base = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
    )
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Sentences(),
        data_collator=collate,
        callbacks=[StopwatchCallback()],
    )
    trainer.train()
    model.save_pretrained(arguments.output_dir)


if __name__ == "__main__":
    main()
