"""The ops of other libraries, timed beside XLA and the kernels: `--peers cudnn,tokamax,pytorch`.

    cudnn     attention by `jax.nn.dot_product_attention(implementation='cudnn')`
    tokamax   attention by `tokamax.dot_product_attention`, with the implementation that it chooses
    pytorch   every op in eager PyTorch with channels_last images (`torch_peer`)

Only their times are kept. A peer that fails, or whose results differ from XLA's, is left out of its
row; the log says why.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxunet.benchmark.cases import check_names
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.measurement import ArrayFunction, Measurement
from jaxunet.runtime.plugins import API, Backend

PYTORCH = 'pytorch'
PEERS = ('cudnn', 'tokamax', PYTORCH)


@runtime_checkable
class Foreign(Protocol):
    """A side of a measurement that is no function of JAX's: `named` returns its program."""

    def named(self, name: str) -> ArrayFunction:
        """Returns a function that runs it and waits for it, under a name in traces."""


def backends(names: Sequence[str]) -> list[Backend]:
    """Returns the peers of these names that compute on JAX arrays, as kernel backends.

    Raises:
      UserError: an unknown peer, or one whose package is not installed.
    """
    check_names('peers', names, dict.fromkeys(PEERS))
    for name, package in (('tokamax', 'tokamax'), (PYTORCH, 'torch')):
        if name in names and importlib.util.find_spec(package) is None:
            raise UserError(f'--peers: {name}: the package {package} is not installed')
    return [
        Backend(name, name, API, {'attention': _attention(name)}, lambda: None)
        for name in names
        if name != PYTORCH
    ]


def with_pytorch(wanted: Sequence[Measurement]) -> list[Measurement]:
    """Returns the measurements with the side `pytorch` where PyTorch has the op."""
    from jaxunet.benchmark.kernels import torch_peer  # noqa: PLC0415 (optional package)

    def sides(m: Measurement) -> dict[str, Any]:
        return {**m.sides, PYTORCH: torch_peer.Side(m)} if torch_peer.has(m) else {**m.sides}

    return [m._replace(sides=sides(m)) for m in wanted]


def fetched(peer: str, result: PyTree) -> PyTree:
    """Returns the results of a peer as arrays that NumPy reads."""
    if peer != PYTORCH:
        return result
    return jax.tree.map(lambda t: t.detach().float().cpu().numpy(), result)


def _attention(peer: str) -> Callable[..., Array]:
    """Returns the op `attention` of a peer."""

    def attention(qkv: Array, *, num_heads: int) -> Array:
        batch, tokens, packed = qkv.shape
        q, k, v = jnp.moveaxis(qkv.reshape(batch, tokens, 3, num_heads, -1), 2, 0)
        if peer == 'cudnn':
            y = jax.nn.dot_product_attention(q, k, v, implementation='cudnn')
        else:
            import tokamax  # noqa: PLC0415 (optional package)

            y = tokamax.dot_product_attention(q, k, v)
        return y.reshape(batch, tokens, packed // 3)

    return attention
