"""Calls a kernel of jaxunet from PyTorch, with gradients: GroupNorm and SiLU of NCHW images.

    python docs/examples/pytorch_kernel.py

PyTorch and JAX share the memory of tensors through dlpack: nothing is copied if the images are
channels_last. The streams of both wait for each other on the GPU, and the host waits for neither.
Each call needs a tensor of PyTorch's current stream as an operand, as here: that makes JAX wait
until PyTorch has read the results of earlier calls, whose memory it may use again.

Use other ops of `jaxunet.ops.functional` in the same way.
"""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')  # leaves memory to PyTorch

import jax
import torch

from jaxunet.ops import functional


def to_jax(t: torch.Tensor) -> jax.Array:
    """Returns a tensor as an array in the same memory; copies it only if it is not contiguous."""
    return jax.dlpack.from_dlpack(t.detach().contiguous())


@functools.partial(jax.jit, static_argnames='groups')
def forward(x: jax.Array, scale: jax.Array, offset: jax.Array, groups: int) -> Any:
    """Returns the value for NHWC images, and the function that computes gradients from its own."""
    op = functools.partial(functional.group_norm, groups=groups, silu=True)
    return jax.vjp(op, x, scale, offset)


backward = jax.jit(lambda pull, dy: pull(dy))


class NormSiLU(torch.autograd.Function):
    """silu(group_norm(x)). Until its gradient is computed, x must not be changed in place."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, groups: int
    ) -> torch.Tensor:
        """Returns the value, channels_last."""
        operands = to_jax(x.permute(0, 2, 3, 1)), to_jax(scale), to_jax(offset)
        y, ctx.pull = forward(*operands, groups=groups)
        return torch.from_dlpack(y).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of x, scale and offset."""
        dx, *others = map(torch.from_dlpack, backward(ctx.pull, to_jax(dy.permute(0, 2, 3, 1))))
        return dx.permute(0, 3, 1, 2), *others, None


def norm_silu(
    x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, groups: int = 32
) -> torch.Tensor:
    """Returns silu(group_norm(x)) in the type of x.

    Args:
      x: (batch, channels, height, width), channels_last, float32, bfloat16 or float16.
      scale, offset: (channels,), float32.
    """
    return NormSiLU.apply(x, scale, offset, groups)


def main() -> None:
    """Compares values and gradients with PyTorch's own."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    x = torch.randn(32, 64, 64, 64, device=device).to(memory_format=torch.channels_last)
    x = x.to(torch.bfloat16).requires_grad_()
    scale, offset = torch.ones(64, device=device), torch.zeros(64, device=device)
    scale.requires_grad_(), offset.requires_grad_()
    weights = x, scale, offset
    found = torch.autograd.grad(norm_silu(*weights).float().square().mean(), weights)
    wide = torch.nn.functional.group_norm(x.float(), 32, scale, offset)
    exact = torch.autograd.grad(torch.nn.functional.silu(wide).square().mean(), weights)
    for name, a, b in zip(('x', 'scale', 'offset'), found, exact, strict=True):
        print(f'gradient of {name}: largest difference {(a - b).abs().max() / b.abs().max():.1e}')


if __name__ == '__main__':
    main()
