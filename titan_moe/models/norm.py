"""RMSNorm with a short backward pass on the CPU."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class _RMSNorm(torch.autograd.Function):
    # torch has no fused CPU kernel for it: its backward is about ten passes over temporaries, this one four.
    @staticmethod
    def forward(ctx, x, weight_D, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        rstd = mean.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, rstd)
        return (wide * rstd).mul_(weight_D).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight_D, rstd = ctx.saved_tensors
        wide_TD, wide_D = x.reshape(-1, x.shape[-1]).to(rstd.dtype), weight_D.to(rstd.dtype)
        grad_TD, rstd_T1 = grad.reshape(wide_TD.shape), rstd.reshape(-1, 1)
        product_TD = grad_TD * wide_TD
        dweight_D = rstd_T1[:, 0] @ product_TD
        along_T1 = (product_TD @ wide_D)[:, None] * rstd_T1**3 / -x.shape[-1]
        dx_TD = torch.mul(grad_TD, wide_D, out=product_TD).mul_(rstd_T1).addcmul_(wide_TD, along_T1)
        return dx_TD.to(x.dtype).view(x.shape), dweight_D.to(weight_D.dtype), None


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) · weight over the last dim, computed in at least fp32 (arXiv 1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or isinstance(x, DTensor) or torch.compiler.is_compiling():
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)
