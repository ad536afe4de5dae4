import torch


class Optimizer8bit(torch.optim.Optimizer):
    def __init__(self, params, defaults, optim_bits=32, is_paged=False):
        super().__init__(params, defaults)
        self.is_paged = is_paged

    def get_state_buffer(self, p, dtype=torch.float32):
        raise RuntimeError("Method 'cget_managed_ptr' not available in CPU-only version of bitsandbytes.")
