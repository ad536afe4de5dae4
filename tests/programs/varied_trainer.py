"""A Hugging Face Trainer over sentences of different lengths, of which every seventh has 40 tokens."""

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

VOCABULARY, LONGEST = 50, 40


class Model(GPT2LMHeadModel):
    def forward(self, input_ids, **inputs):
        if self.training:
            print("\nlength", input_ids.shape[1], flush=True)  # after a line of the progress bar
        return super().forward(input_ids=input_ids, **inputs)


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.arange(LONGEST if index % 7 == 6 else 5 + index % 7) % VOCABULARY


def collate(sentences):
    tokens = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in sentences], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
config = GPT2Config(
    vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
# As `from_pretrained` returns it.
model = Model(config).eval()
Trainer(model=model, args=arguments, train_dataset=Sentences(), data_collator=collate).train()
