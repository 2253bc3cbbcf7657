"""Digests and kernel launches of the lowered training step, to notice changes of its program.

    python tests/support/lowered_step.py                       # compares all with `RECORDED`
    python tests/support/lowered_step.py --write               # records all
    python tests/support/lowered_step.py small pallas [FILE]   # prints one; writes its text to FILE

The step is lowered for an H200 on any machine. The text that is hashed has no locations, and no
names of Python modules or functions: functions are numbered in the order of their calls. The same
holds for the Pallas kernels, which are MLIR bytecode in the program. CUDA kernels are in the text
only by name and attributes; their machine code has separate digests.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pathlib
import re
import runpy
import sys
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax._src.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / 'tests')]

from support import kernel_names  # noqa: E402
from support.commands import Fork  # noqa: E402

RECORDED = ROOT / 'tests' / 'fixtures' / 'lowered_step.json'
CONFIGS, BACKENDS = ('small', 'elephants64'), ('xla', 'pallas', 'cuda')
SMALL = {
    'precision': 'bfloat16',
    'model': {'base_channels': 64, 'channel_mult': (1, 2), 'attention_resolutions': (8,)},
    'data': {'image_size': (16,), 'batch_size': 4},
}
BYTECODE = b'ML\xefR'
NOT_THE_PROGRAM = ('jax.result_info', 'jax.arg_info')  # attributes that name parts of pytrees


def lower(name: str, backend: str) -> jax.stages.Lowered:
    """The lowered training step of a config with the kernels of a backend.

    All imports from the project are in this function.
    """
    from jaxunet.checkpoint.optimizer import make_optimizer  # noqa: PLC0415
    from jaxunet.checkpoint.store import state_template  # noqa: PLC0415
    from jaxunet.config import Config, resolve, to_dict  # noqa: PLC0415
    from jaxunet.diffusion.process import make_diffusion  # noqa: PLC0415
    from jaxunet.model.unet import build_unet  # noqa: PLC0415
    from jaxunet.ops.backends import choose  # noqa: PLC0415
    from jaxunet.runtime import device  # noqa: PLC0415
    from jaxunet.training.step import make_train_step  # noqa: PLC0415

    if name == 'small':
        config = resolve(to_dict(Config().replace(**SMALL)))
    else:
        config = resolve(runpy.run_path(str(ROOT / 'configs' / f'{name}.py'))['get_config']())
    config = config.replace(backend=backend)
    kernels = choose(backend, config.precision, here=False)
    step = make_train_step(
        config,
        build_unet(config, kernels.ops),
        make_diffusion(config.diffusion),
        make_optimizer(config),
        kernels,
    )
    size = config.data.batch_size
    batch = {
        'image': jax.ShapeDtypeStruct((size, *config.image_shape), 'uint8'),
        'label': jax.ShapeDtypeStruct((size,), 'int32'),
        'row': jax.ShapeDtypeStruct((size,), 'int32'),
    }
    with device.use(device.Target.HOPPER):
        return (
            jax.jit(step, donate_argnums=0)
            .trace(state_template(config), batch)
            .lower(lowering_platforms=('cuda',))
        )


def text(lowered: jax.stages.Lowered) -> str:
    """The program's text without locations and names from Python's sources.

    A digest replaces every kernel in bytecode.
    """
    module = lowered.compiler_ir('stablehlo')
    with module.context:
        module = module.operation.clone()
        functions = {
            op.operation.attributes['sym_name'].value: op.operation
            for op in _children(module)
            if op.name == 'func.func'
        }
        order = ['main']
        for name in order:  # grows during the loop
            for op in _descendants(functions[name]):
                _clean(op)
                if (
                    op.name == 'func.call'
                    and (callee := op.attributes['callee'].value) not in order
                ):
                    order.append(callee)
        others = [_assembly(op) for op in _children(module) if op.name != 'func.func']
        numbers = {name: f'@function_{i}' for i, name in enumerate(order)}
        names = re.compile(r'@(?:"([^"]+)"|([\w.$-]+))')

        def renamed(match: re.Match[str]) -> str:
            return numbers.get(match[1] or match[2], match[0])

        ordered = [names.sub(renamed, _assembly(functions[name])) for name in order]
        return '\n'.join([*others, *ordered]) + '\n'


def _children(op: ir.Operation) -> list[ir.Operation]:
    return [
        child.operation
        for region in op.regions
        for block in region.blocks
        for child in block.operations
    ]


def _assembly(op: ir.Operation) -> str:
    # In local scope: otherwise the whole module would be numbered again for each of its functions.
    return op.get_asm(enable_debug_info=False, use_local_scope=True)


def _descendants(op: ir.Operation) -> list[ir.Operation]:
    """An operation and all operations inside it, in the order of the text."""
    return [op, *(inner for child in _children(op) for inner in _descendants(child))]


def _clean(op: ir.Operation) -> None:
    """Cleans an operation for the text that is hashed.

    It removes the names of pytrees from a function, and replaces the kernel of a custom call by its
    digest.
    """
    for attribute in ('arg_attrs', 'res_attrs'):
        if op.name == 'func.func' and attribute in op.attributes:
            kept = [
                ir.DictAttr.get(
                    {a.name: a.attr for a in ir.DictAttr(one) if a.name not in NOT_THE_PROGRAM}
                )
                for one in ir.ArrayAttr(op.attributes[attribute])
            ]
            op.attributes[attribute] = ir.ArrayAttr.get(kept)
    if op.name == 'stablehlo.custom_call' and 'mhlo.backend_config' in op.attributes:
        config = {a.name: a.attr for a in ir.DictAttr(op.attributes['mhlo.backend_config'])}
        config.pop('kernel_hash', None)  # a hash of the bytecode including locations
        for key, value in config.items():
            if isinstance(value, ir.StringAttr) and value.value_bytes.startswith(BYTECODE):
                config[key] = ir.StringAttr.get(_kernel_digest(value.value_bytes))
        op.attributes['mhlo.backend_config'] = ir.DictAttr.get(config)


def _kernel_digest(bytecode: bytes) -> str:
    """Returns the digest of a kernel's text without locations."""
    context = make_ir_context()
    context.allow_unregistered_dialects = True
    with context:
        found = ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=False)
    if '.py"' in found:
        raise ValueError(
            f'a kernel still names a Python file: {found[max(found.index(".py") - 200, 0) :][:400]}'
        )
    return hashlib.sha256(found.encode()).hexdigest()


class Program(NamedTuple):
    """Record of a program: the digest of its text, and launches by kernel."""

    digest: str
    launches: dict[str, int]


def program(name: str, backend: str) -> Program:
    """Lowers the step in a separate process, so that it shares nothing that was traced before.

    The process is a fork of one that has traced nothing either, and imported what it needs.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(('JAX_', 'XLA_'))}
    environment |= {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
    done = Fork(['support.lowered_step', name, backend], environment, ROOT / 'tests')
    out, error = done.communicate()
    if done.returncode:
        raise RuntimeError(f'{name}, {backend}: cannot be lowered:\n{error}')
    return Program(*json.loads(out))


def recorded() -> tuple[str, dict[str, Program]]:
    """The version of JAX of the recorded programs, and the programs by 'CONFIG BACKEND'."""
    found = json.loads(RECORDED.read_text(encoding='utf-8'))
    return found['jax'], {key: Program(**value) for key, value in found['programs'].items()}


def record(programs: Mapping[str, Program]) -> None:
    """Replaces the recorded programs of the same names by these."""
    with RECORDED.open('r+', encoding='utf-8') as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several workers of a test run may come at once
        merged = json.load(file)['programs']
        merged |= {key: value._asdict() for key, value in programs.items()}
        file.seek(0)
        file.truncate()
        json.dump({'jax': jax.__version__, 'programs': merged}, file, indent=1)
        file.write('\n')


def differences(old: Program, new: Program) -> str:
    """Returns text with the kernels that are launched more or less often; '' if there are none."""
    return ', '.join(
        f'{name} {old.launches.get(name, 0)} -> {new.launches.get(name, 0)}'
        for name in sorted(old.launches.keys() | new.launches.keys())
        if old.launches.get(name, 0) != new.launches.get(name, 0)
    )


def main(arguments: list[str]) -> int:
    if arguments not in ([], ['--write']):
        lowered = lower(*arguments[:2])
        found = text(lowered)
        for path in arguments[2:]:
            pathlib.Path(path).write_text(found, encoding='utf-8')
        launches = dict(sorted(kernel_names.count(lowered).items()))
        print(json.dumps([hashlib.sha256(found.encode()).hexdigest(), launches]))
        return 0
    programs = {
        f'{name} {backend}': program(name, backend) for name in CONFIGS for backend in BACKENDS
    }
    if arguments:
        record(programs)
        return 0
    version, known = recorded()
    for key, value in programs.items():
        changed = differences(known[key], value) or 'the same launches'
        print(f'{key}: {"equal" if value == known[key] else f"DIFFERENT, {changed}"}')
    if version != jax.__version__:
        print(f'recorded with jax {version}, compared with {jax.__version__}')
    return int(programs != known)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
