import torch
import triton


@triton.jit
def _rms_norm_forward_kernel(y, x, w, rstd, eps): ...


@triton.jit
def _rms_norm_backward_kernel(dy, dx, x, w, rstd, dw): ...


class LigerRMSNormFunction(torch.autograd.Function):
    """Norms rows. The gradient of the weight is summed for each processor of the GPU apart."""

    @staticmethod
    def forward(ctx, x, w, eps):
        rows = x.view(-1, x.shape[-1])
        y = torch.empty_like(rows)
        rstd = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        _rms_norm_forward_kernel[(len(rows),)](y, rows, w, rstd, eps)
        ctx.save_for_backward(rows, w, rstd)
        return y.view(*x.shape)

    @staticmethod
    def backward(ctx, dy):
        rows, w, rstd = ctx.saved_tensors
        processors = 1
        if rows.device.type == "cuda":
            processors = torch.cuda.get_device_properties(rows.device).multi_processor_count
        parts = torch.empty((processors, rows.shape[1]), dtype=torch.float32, device=w.device)
        _rms_norm_backward_kernel[(processors,)](dy, dy, rows, w, rstd, parts)
        return dy.view(*dy.shape), parts.sum(dim=0).to(w.dtype), None


def cross_entropy_backward(grad_logits, grad_output):
    if torch.equal(grad_output, torch.tensor(1.0, device=grad_output.device)):
        return grad_logits
    return grad_logits * grad_output
