"""Prints the calls of GroupNorm's backward handlers in one training step, to update shapes.inc.

    PYTHONPATH=. python tools/gpu/harness/gnback/calls.py CONFIG     # such as elephants64

The step is lowered for an H200; this needs the built CUDA extension, but no GPU. Prints a line for
each kind of call: number of calls, shape of dy, channels of the parts of x, then the attributes
groups, silu, activation, added and samples, and whether it has dropout.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from collections.abc import Callable, Sequence

import jax

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[3])]

from support import lowered_step  # noqa: E402

from xla_ffi.call import ffi_call  # noqa: E402
from xla_ffi.group_norm import vjp  # noqa: E402


def main(config: str) -> None:
    """Lowers the training step of a config with the CUDA kernels, and prints its calls."""
    calls: collections.Counter[tuple] = collections.Counter()

    def spy(name: str, shapes: Sequence[jax.ShapeDtypeStruct]) -> Callable[..., object]:
        call = ffi_call(name, shapes)

        def run(*operands: jax.Array, **options: int) -> object:
            if name in ('jaxunet_group_norm_gradient', 'jaxunet_group_norm_dropout_gradient'):
                parts = int(options['parts'])
                kinds = ('groups', 'silu', 'activation', 'added', 'samples')
                widths = tuple(x.shape[3] for x in operands[:parts])
                flags = (*(int(options[k]) for k in kinds), int('dropout' in name))
                calls[operands[parts].shape, widths, *flags] += 1
            return call(*operands, **options)

        return run

    vjp.ffi_call = spy
    lowered_step.lower(config, 'cuda')
    for call, count in sorted(calls.items(), key=lambda item: (-item[0][0][1], item[0])):
        print(count, *call)


if __name__ == '__main__':
    main(sys.argv[1])
