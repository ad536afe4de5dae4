import torch

register_fake = torch.library.register_fake

torch.library.define(
    "bitsandbytes::quantize_4bit",
    "(Tensor A, int blocksize, str quant_type, ScalarType quant_storage) -> (Tensor, Tensor)",
)


@register_fake("bitsandbytes::quantize_4bit")
def _(A, blocksize, quant_type, quant_storage):
    numbers = A.numel()
    absmax = torch.empty((-(numbers // -blocksize),), device=A.device, dtype=torch.float32)
    return torch.empty(((numbers + 1) // 2, 1), device=A.device, dtype=quant_storage), absmax


torch.library.define(
    "bitsandbytes::dequantize_4bit",
    "(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) -> Tensor",
)


@register_fake("bitsandbytes::dequantize_4bit")
def _(A, absmax, blocksize, quant_type, shape, dtype):
    return torch.empty(shape, dtype=dtype, device=A.device)


torch.library.define(
    "bitsandbytes::int8_vectorwise_quant", "(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)"
)


@register_fake("bitsandbytes::int8_vectorwise_quant")
def _(A, threshold=0.0):
    rows = torch.empty(A.numel() // A.shape[-1], device=A.device, dtype=torch.float32)
    columns = A.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)
    return torch.empty(A.shape, device=A.device, dtype=torch.int8), rows, columns


torch.library.define("bitsandbytes::int8_linear_matmul", "(Tensor A, Tensor B) -> Tensor")


@register_fake("bitsandbytes::int8_linear_matmul")
def _(A, B):
    return torch.empty((*A.shape[:-1], B.shape[0]), device=A.device, dtype=torch.int32)


torch.library.define(
    "bitsandbytes::optimizer_update_8bit_blockwise",
    "(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) state1, Tensor(a3!)? state2, float beta1, "
    "float beta2, float beta3, float alpha, float eps, int step, float lr, Tensor(a4!) qmap1, Tensor(a5!)? qmap2, "
    "Tensor(a6!) absmax1, Tensor(a7!)? absmax2, float weight_decay, float gnorm_scale, bool skip_zeros=False) -> ()",
)


@register_fake("bitsandbytes::optimizer_update_8bit_blockwise")
def _(optimizer_name, g, p, state1, *others, **more): ...
