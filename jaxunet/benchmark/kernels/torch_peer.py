"""The ops in PyTorch, as a network in eager mode calls them on channels_last images.

Importing this module needs PyTorch (extra `peers`). Weights, biases, scales and offsets have the
type of the images, as after `module.to(torch.bfloat16)`; for AdamW, all arrays are float32. cuDNN
chooses its convolutions by timing them. A norm and its SiLU are two calls, and so are a convolution
and the sum with its residual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
from jaxtyping import PyTree
from torch.nn import functional as F

from jaxunet.benchmark.kernels.adamw import CONSTANTS
from jaxunet.ops.attention import cases as attention_cases
from jaxunet.ops.group_norm import cases as group_norm_cases
from jaxunet.runtime import gpu_time
from jaxunet.runtime.measurement import Arrays, Measurement

DTYPE = torch.bfloat16
GROUPS = 32  # of the norms of all measured cases
ROWS = ('bias', 'shift', 'scale', 'offset')
Call = Callable[[], PyTree]


class Side:
    """A measurement's side in PyTorch, which JAX cannot trace; `named` returns its program."""

    def __init__(self, m: Measurement) -> None:
        self.m = m

    def named(self, name: str) -> Callable[[Arrays], PyTree]:
        """Returns a function of the measurement's JAX arrays that runs the op and waits for it.

        The first call of each set of arrays converts them, without their memory if possible.

        Args:
          name: of the program in traces; see `jaxunet.runtime.gpu_time.marker`.
        """
        begin, other = gpu_time.marker(name), gpu_time.marker('')
        ready = dict[int, tuple[Arrays, Call]]()

        def run(inputs: Arrays) -> PyTree:
            key = id(jax.tree.leaves(inputs)[0])
            with torch.backends.cudnn.flags(enabled=True, benchmark=True):
                if key not in ready:
                    other()  # kernels that convert are of no program
                    ready[key] = inputs, prepared(self.m, jax.tree.map(torch.from_dlpack, inputs))
                    _wait()
                begin()
                result = ready[key][1]()
            _wait()
            return result

        return run


def has(m: Measurement) -> bool:
    """Returns True if PyTorch has the op of a measurement, in its direction."""
    return m.op != 'adamw' or m.direction == 'step'


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prepared(m: Measurement, inputs: Arrays) -> Call:
    """Returns the call of a measurement; its results have the order and the axes of XLA's.

    Args:
      inputs: PyTorch's tensors with the axes of JAX's arrays. AdamW works on copies.
    """
    if m.op == 'adamw':
        return _adamw(inputs)
    i = {name: _converted(m, name, value) for name, value in inputs.items()}
    if m.direction == 'forward':
        return torch.no_grad()(lambda: _restored(m, 'y', _forward(m, i)))
    dy = i.pop('dy')
    if m.direction != 'forward+backward':
        return _one_gradient(m, i, dy)
    fixed = ['added', 'sums']
    if m.op == 'norm_silu_conv3x3' and 'shortcut' not in i:
        fixed.append('residual')
    free = {name: _leaves(value) for name, value in i.items() if name not in fixed}
    leaves, tree = jax.tree.flatten(free)

    def both() -> PyTree:
        y = _forward(m, i | free)
        products = y[0] if m.op == 'project' else y
        found = torch.autograd.grad(products, leaves, grad_outputs=dy)
        gradients = jax.tree.unflatten(tree, found)
        return _restored(m, 'y', y), {n: _restored(m, n, g) for n, g in gradients.items()}

    return both


def _one_gradient(m: Measurement, i: Arrays, dy: torch.Tensor) -> Call:
    """Returns the call of an input or weight gradient, without the forward pass before it."""
    features, height, width = dy.shape[1:]
    scale = 2 if m.op == 'upsample_conv3x3' else 1
    if m.direction == 'input_gradient':
        name, size = 'x', (len(dy), i['kernel'].shape[1], height // scale, width // scale)
    else:
        name, size = 'kernel', (features, i['x'].shape[1], 3, 3)
    zeros = torch.zeros(size, dtype=DTYPE, device=dy.device)
    leaf = _leaves(zeros.contiguous(memory_format=torch.channels_last))
    y = _forward(m, {**i, name: leaf, 'shift': None})

    def gradient() -> PyTree:
        (result,) = torch.autograd.grad(y, leaf, grad_outputs=dy, retain_graph=True)
        return _restored(m, name, result)

    return gradient


def _forward(m: Measurement, i: Arrays) -> Any:
    """Returns the value of an op; that of `project` is a pair: products, and sums of biases."""
    if m.op == 'attention':
        heads = {case.name: case.heads for case in attention_cases.CASES}[m.case]
        q, k, v = i['qkv'].unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    if m.op == 'linear':
        y = F.linear(i['x'], i['kernel'], i['bias'])
        return y + i['residual'] if 'residual' in i else y
    if m.op == 'project':
        layers = zip(i['kernel'], i['bias'], i['added'], strict=True)
        products = tuple(sum(added, F.linear(i['x'], k, b)) for k, b, added in layers)
        return products, tuple(sum(biases) for biases in i['sums'])
    x = torch.cat(i['x'], dim=1) if isinstance(i['x'], tuple) and len(i['x']) > 1 else i['x']
    x = x[0] if isinstance(x, tuple) else x
    if m.op in ('group_norm', 'norm_silu_conv3x3'):
        x = F.group_norm(x, GROUPS, i['scale'], i['offset'])
        plain = {case.name for case in group_norm_cases.CASES if not case.silu}
        x = x if m.op == 'group_norm' and m.case in plain else F.silu(x)
        if m.op == 'group_norm':
            return x
    elif m.op == 'upsample_conv3x3':
        x = F.interpolate(x, scale_factor=2.0, mode='nearest')
    shift = i['shift']
    per_sample = shift is not None and shift.ndim == 2
    y = F.conv2d(x, i['kernel'], None if per_sample else shift, padding=1)
    y = y + shift[:, :, None, None] if per_sample else y
    if 'residual' not in i:
        return y
    residual = torch.cat(i['residual'], dim=1) if len(i['residual']) > 1 else i['residual'][0]
    return y + (F.conv2d(residual, i['shortcut']) if 'shortcut' in i else residual)


def _adamw(inputs: Arrays) -> Call:
    """Returns a step of PyTorch's fused AdamW and of its averages, on copies of the arrays.

    Gradients are multiplied by their factor before.
    """
    i = jax.tree.map(lambda t: t.float().clone(), inputs)
    c = CONSTANTS
    # XLA's side corrects by 0.5 and 0.25, PyTorch as in a first step: the rate makes up for it.
    rate = 1e-4 * (1 - c.b1) / (1 - c.b2) ** 0.5
    optimizer = torch.optim.AdamW(
        i['params'], lr=rate, betas=(c.b1, c.b2), eps=c.eps, weight_decay=0.0, fused=True
    )
    for p, gradient, mu, nu in zip(i['params'], i['gradients'], i['mu'], i['nu'], strict=True):
        p.grad = gradient * i['factor']
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] = {'step': step, 'exp_avg': mu, 'exp_avg_sq': nu}

    @torch.no_grad()
    def call() -> PyTree:
        optimizer.step()
        for average in i['averages']:
            torch._foreach_lerp_(average, i['params'], 1e-3)
        return {name: i[name] for name in ('params', 'mu', 'nu', 'averages')}

    return call


def _leaves(value: PyTree) -> PyTree:
    """Returns tensors that gradients are computed of."""
    return jax.tree.map(lambda t: t.detach().requires_grad_(), value)


def _of_images(m: Measurement) -> bool:
    return m.op not in ('attention', 'linear', 'project')


def _converted(m: Measurement, name: str, value: PyTree) -> PyTree:
    """Returns tensors of JAX's axes and types with PyTorch's; images stay where they are."""

    def one(t: torch.Tensor) -> torch.Tensor:
        t = t.to(DTYPE)
        if name == 'kernel' and t.ndim == 4:
            return t.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
        if name in ('kernel', 'shortcut'):
            return t.T.contiguous()[(..., *(None,) * (2 * (name == 'shortcut')))]
        if name in ROWS and t.ndim == 2 and len(t) == 1:
            return t[0]
        return t.permute(0, 3, 1, 2) if t.ndim == 4 and _of_images(m) else t

    return jax.tree.map(one, value)


def _restored(m: Measurement, name: str, value: PyTree) -> PyTree:
    """Returns tensors with the axes of JAX's, as views."""

    def one(t: torch.Tensor) -> torch.Tensor:
        if name == 'shortcut':
            return t[:, :, 0, 0].T
        if name == 'kernel':
            return t.permute(2, 3, 1, 0) if t.ndim == 4 else t.T
        return t.permute(0, 2, 3, 1) if t.ndim == 4 and _of_images(m) else t

    return jax.tree.map(one, value)
