"""Counts the kernels of a lowered program by name."""

import collections
import re

import jax
from jaxlib.mlir import ir

NAME = re.compile(
    r'jaxunet_[a-z0-9_]+?(?=(?:_mosaic_gpu|_\d+)?\b)'
)  # Mosaic adds a suffix to some, and numbers a dump


def count(lowered: jax.stages.Lowered) -> collections.Counter[str]:
    """Counts the launches of each of our kernels in one call of the program.

    XLA's 3×3 convolutions of stride 1 count as 'convolution', other custom calls under their
    target. A function that is called from several places counts once for each call.
    """
    functions = {
        f.operation.attributes['sym_name'].value: f.operation
        for f in lowered.compiler_ir('stablehlo').body.operations
    }
    known: dict[str, collections.Counter[str]] = {}

    def of(name: str) -> collections.Counter[str]:
        if name not in known:
            found: collections.Counter[str] = collections.Counter()
            inside(functions[name], found)
            known[name] = found
        return known[name]

    def inside(operation: ir.Operation, found: collections.Counter[str]) -> None:
        for region in operation.regions:
            for block in region.blocks:
                for child in block.operations:
                    visit(child.operation, found)

    def visit(operation: ir.Operation, found: collections.Counter[str]) -> None:
        if operation.name == 'func.call':
            found.update(of(operation.attributes['callee'].value))
        elif operation.name == 'stablehlo.custom_call':
            config = ' '.join(
                str(operation.attributes[key])
                for key in ('backend_config', 'mhlo.backend_config')
                if key in operation.attributes
            )
            names = set(NAME.findall(config))
            assert len(names) <= 1, names
            found[names.pop() if names else operation.attributes['call_target_name'].value] += 1
        elif operation.name == 'stablehlo.convolution':
            kernel = operation.operands[1].type.shape  # HWIO, the layout of all our kernels
            strides = operation.attributes.get('window_strides', [1])
            if kernel[:2] == [3, 3] and set(strides) == {1}:
                found['convolution'] += 1
        inside(operation, found)

    return of('main')
