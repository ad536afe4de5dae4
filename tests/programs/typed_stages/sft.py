"""Fine-tunes a small model as TRL does: the arguments come first, then the model is read from its folder.

`accelerate launch --config_file plugin.yaml sft.py --output_dir out --max_steps 60`
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

MODEL = Path(__file__).with_name("model")
PRESETS = Path(__file__).with_name("presets")


@dataclass
class Arguments(TrainingArguments):
    """The Trainer's, whose DeepSpeed configuration may be the name of a preset, as in ms-swift."""

    def __post_init__(self) -> None:
        preset = PRESETS / f"{self.deepspeed}.json"
        if preset.exists():
            self.deepspeed = str(preset)
        super().__post_init__()


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences of numbers that count up."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(32) * (index % 7 + 1) + index) % 128
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    # The process group is made when the Trainer asks for the device, so it does not exist yet.
    model = GPT2LMHeadModel.from_pretrained(MODEL)
    Trainer(model=model, args=arguments, train_dataset=Numbers()).train()


if __name__ == "__main__":
    main()
