"""Makes its model within `deepspeed.zero.Init` and draws its weights anew: at stage 3 there are none to draw, here."""

import deepspeed
import torch
import torch.nn.functional as F
from toy import CLASSES, FEATURES, parse_arguments, small_model

args = parse_arguments()
deepspeed.init_distributed()
with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
    model = small_model()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
samples = torch.Generator().manual_seed(3)
data = torch.utils.data.TensorDataset(
    torch.randn(4096, FEATURES, generator=samples), torch.randint(0, CLASSES, (4096,), generator=samples)
)
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=data
)
while True:
    for inputs, labels in loader:
        inputs, labels = inputs.to(engine.device), labels.to(engine.device)
        engine.backward(F.cross_entropy(engine(inputs), labels))
        engine.step()
