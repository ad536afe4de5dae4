import torch

from bitsandbytes.optim.optimizer import Optimizer8bit


class PagedAdamW8bit(Optimizer8bit):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr}, is_paged=True)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    for name in ("state1", "state2"):
                        state[name] = self.get_state_buffer(p, dtype=torch.uint8)
                    for name in ("absmax1", "absmax2"):
                        state[name] = torch.zeros(-(p.numel() // -256), dtype=torch.float32, device=p.device)
                    for name in ("qmap1", "qmap2"):
                        state[name] = torch.zeros(256, dtype=torch.float32, device=p.device)
                s = state
                torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
                    "adam", p.grad, p, s["state1"], s["state2"], 0.9, 0.99, 0.0, 0.0, 1e-8, 1, group["lr"],
                    s["qmap1"], s["qmap2"], s["absmax1"], s["absmax2"], 0.0, 1.0,
                )  # fmt: skip
