"""The same training as a loop of the user's own with Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from sft import MODEL, Numbers
from transformers import GPT2LMHeadModel

# On a CPU Accelerate has to be told how its processes talk to each other.
cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
accelerator = Accelerator(gradient_accumulation_steps=2, kwargs_handlers=cpu)
model = GPT2LMHeadModel.from_pretrained(MODEL)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.utils.data.DataLoader(Numbers(), batch_size=2)
)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
