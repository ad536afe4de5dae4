import torch


class Params4bit(torch.nn.Parameter):
    """A weight that is packed when it comes to a device."""

    def __new__(cls, data=None, requires_grad=False, blocksize=64, packed=None):
        self = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, requires_grad)
        self.blocksize, self.packed = blocksize, packed
        return self

    def cuda(self, device=None, non_blocking=False):
        return self.to(device="cuda" if device is None else device)

    def to(self, *args, **kwargs):
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or self.packed is not None:
            data = super().to(device=device, dtype=dtype if self.packed is None else None)
            return Params4bit(data, self.requires_grad, self.blocksize, self.packed)
        whole = self.data.contiguous().to(device)
        packed, absmax = torch.ops.bitsandbytes.quantize_4bit(whole, self.blocksize, "nf4", torch.uint8)
        self.packed = (absmax, tuple(whole.shape))
        self.data = packed
        return self


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, packed, blocksize):
        ctx.packed, ctx.blocksize = packed, blocksize
        ctx.save_for_backward(weight)
        return torch.nn.functional.linear(x, _whole(weight, packed, blocksize, x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        whole = _whole(weight, ctx.packed, ctx.blocksize, gradient.dtype)
        return torch.matmul(gradient, whole), None, None, None


def _whole(weight, packed, blocksize, dtype):
    absmax, shape = packed
    return torch.ops.bitsandbytes.dequantize_4bit(weight, absmax, blocksize, "nf4", shape, dtype)


class Linear4bit(torch.nn.Linear):
    def __init__(self, input_features, output_features):
        super().__init__(input_features, output_features, bias=False)
        self.weight = Params4bit(self.weight.data)

    def forward(self, x):
        assert isinstance(self.weight, Params4bit)
        return _Product.apply(x, self.weight, self.weight.packed, self.weight.blocksize)
