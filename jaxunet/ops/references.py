"""The backend `xla`: the references of all ops, and variants that are composed from plain ops.

It needs no config, so that a test of a kernel depends on none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array

from jaxunet.ops.activation import Activation
from jaxunet.ops.adamw import reference as update
from jaxunet.ops.attention.reference import attention
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.conv3x3.reference import conv3x3, norm_silu_conv3x3
from jaxunet.ops.conv3x3.upsampling import upsampled
from jaxunet.ops.group_norm.reference import group_norm
from jaxunet.ops.linear.projections import project
from jaxunet.ops.linear.reference import linear
from jaxunet.ops.vocabulary import FusedUpdate, Ops, WithInput, check_copies

Op = Callable[..., Any]  # a field of `Ops`, each of which has its own signature
UPSAMPLED, PROJECT = 'upsample_conv3x3', 'project'
# The plain op that a variant belongs to: a config gives both to the same backend.
VARIANTS = {
    UPSAMPLED: 'conv3x3',
    'norm_silu_conv3x3_and_input': 'norm_silu_conv3x3',
    'group_norm_and_input': 'group_norm',
    PROJECT: 'linear',
}
REFERENCES: Mapping[str, Op] = {
    'conv3x3': conv3x3,
    'norm_silu_conv3x3': norm_silu_conv3x3,
    'group_norm': group_norm,
    'attention': attention,
    'linear': linear,
}


@functools.cache
def and_input(op: Op) -> Callable[..., WithInput[Activation | Array]]:
    """Composes the `..._and_input` variant of an op from the plain op.

    XLA adds the gradients of the copies, as it does for any array with several readers.
    """

    def call(
        x: Activation | Convolution, *operands: object, copies: int = 1, **options: object
    ) -> WithInput[Activation | Array]:
        check_copies(op.__name__, copies)
        image = x.image if isinstance(x, Convolution) else x
        return WithInput(op(x, *operands, **options), (image,) * copies)

    return call


def implementation(name: str, ops: Mapping[str, Op]) -> Op:
    """Returns a backend's op or variant; composes a missing variant.

    `project` does not call the plain op `linear`: XLA computes it.

    Args:
      name: a field of `Ops`.
      ops: the backend's implementations by name.
    """
    if name in ops:
        return ops[name]
    if name == PROJECT:
        return project
    compose = upsampled if name == UPSAMPLED else and_input
    return compose(ops[VARIANTS[name]])


# The reference of the op `adamw`; training on xla runs optax.
UPDATE = FusedUpdate(update.sum_of_squares, update.adamw, update.narrow, updates_copies=True)
XLA = Ops(**{name: implementation(name, REFERENCES) for name in Ops._fields})
