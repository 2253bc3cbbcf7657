"""The conv3x3 ops as functions of named inputs, for parity tests of every backend."""

from __future__ import annotations

import functools

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.cases import Case
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from support.parity import draw


def inputs(case: Case, dtype: str, batch: int):
    shapes = {
        f'x{i}': ((batch, case.height, case.width, c), dtype) for i, c in enumerate(case.parts)
    }
    shapes['kernel'] = ((3, 3, case.channels, case.features), dtype)
    shapes['shift'] = ((batch if case.per_sample else 1, case.features), 'float32')
    if case.norm:
        shapes['scale'] = shapes['offset'] = ((1, case.channels), 'float32')
    shapes |= {
        f'residual{i}': ((batch, case.height, case.width, c), dtype)
        for i, c in enumerate(case.residual)
    }
    if case.residual and case.residual != (case.features,):
        shapes['shortcut'] = ((sum(case.residual), case.features), dtype)
    scales = {'kernel': (9 * case.channels) ** -0.5, 'shortcut': max(sum(case.residual), 1) ** -0.5}
    return {
        name: (draw(shape, kind, scale=scales.get(name, 1.0)), kind)
        for name, (shape, kind) in shapes.items()
    }


@functools.cache  # so that equal references are known to be equal
def op(module, case: Case, copies: int = 0):
    """Returns the op of a module as a function of named arrays.

    With `copies` above 0 it is the variant that also returns this number of copies of x.
    """

    def call(**arrays):
        x = Activation(tuple(arrays[f'x{i}'] for i in range(len(case.parts))))
        residual = Activation(tuple(arrays[f'residual{i}'] for i in range(len(case.residual))))
        conv = Convolution(
            image=x,
            norm=Norm(arrays['scale'], arrays['offset'], case.groups) if case.norm else None,
            kernel=arrays['kernel'],
            shift=arrays['shift'],
            residual=residual if case.residual else None,
            shortcut=arrays.get('shortcut'),
        )
        if copies:
            return module.norm_silu_conv3x3_and_input(conv, copies=copies)
        return (module.norm_silu_conv3x3 if case.norm else module.conv3x3)(conv).value

    return call
