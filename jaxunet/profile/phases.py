"""Classifies operations by their names: phase of the training step, backend, collective."""

from __future__ import annotations

import functools
import re

DATA, FORWARD, BACKWARD, ALL_REDUCE, OPTIMIZER, OTHER = PHASES = (
    'data',
    'forward',
    'backward',
    'all-reduce',
    'optimizer',
    'other',
)
XLA, PALLAS, CUDA = 'xla', 'pallas', 'cuda'

_COLLECTIVES = (
    'all-reduce',
    'all-gather',
    'reduce-scatter',
    'all-to-all',
    'collective-permute',
    'nccldevkernel',
    'ncclkernel',
)
_OWN = re.compile(r'jaxunet_\w+')
_CUDA_KERNEL = re.compile(r'jaxunet::cuda::(?:\(anonymous namespace\)::|\w+::)*(\w+)[<(]')
_SCOPE = re.compile(r'[^/();]+')
# Scopes that JAX's transformations and loops insert between the names of modules.
_BETWEEN = (
    'shard_map',
    'pmap',
    'checkpoint',
    'rematted_computation',
    'closed_call',
    'eval_jaxpr',
    'while',
    'body',
    'cond',
    'pallas_call',
)


@functools.cache
def phase_of(path: str) -> str:
    """Returns the phase of an operation, one of `PHASES`, from its scope path.

    The training step (`jaxunet.training.step`) names its scopes data, forward, backward and
    optimizer. JAX wraps the scope of a gradient in `transpose(...)`, as in
    `jit(whole)/transpose(jvp(forward))/UNet/middle_res_0/dot_general`. Collectives are recognised
    by their name instead (`is_collective`).
    """
    scopes = set(_SCOPE.findall(path))
    if OPTIMIZER in scopes:
        return OPTIMIZER
    if DATA in scopes:
        return DATA
    if 'all_reduce' in scopes:
        return ALL_REDUCE
    if 'transpose(' in path or BACKWARD in scopes:
        return BACKWARD
    return FORWARD if FORWARD in scopes else OTHER


def own_name(*names: str) -> str:
    """Returns the stable name `jaxunet_...` of one of our kernels; '' for any other kernel.

    A kernel of the CUDA library, `jaxunet::cuda::...::NAME<...>(...)`, is called
    `jaxunet_cuda_NAME`, whatever its template arguments.

    Args:
      names: names of the kernel and of its instruction.
    """
    if library := next((match for name in names if (match := _CUDA_KERNEL.search(name))), None):
        return f'jaxunet_{CUDA}_{library[1]}'
    own = next((match[0] for name in names if (match := _OWN.search(name))), '')
    return own.removesuffix('_mosaic_gpu_kernel')  # appended by Pallas


def backend_of(*names: str) -> str:
    """Returns the backend of a kernel, xla, pallas or cuda, from its kernel and instruction names.

    Kernels whose `own_name` is `jaxunet_cuda_...` are from the CUDA library; other `jaxunet_...`
    kernels are from Pallas.
    """
    own = own_name(*names)
    return CUDA if own.startswith(f'jaxunet_{CUDA}_') else PALLAS if own else XLA


def is_collective(*names: str) -> bool:
    """Returns True if an opcode, instruction or kernel name is that of a collective."""
    return any(name.lower().startswith(_COLLECTIVES) for name in names)


def module_of(path: str) -> str:
    """Returns the module of the model in a scope path, e.g. `UNet/up_0_res_1`; '' outside modules.

    It leaves out the primitive (the last component), functions (`jit(...)`, `UNet._embed`) and
    JAX's transformations.
    """
    parts = path.partition(';')[0].split('/')[:-1]
    scopes = [i for i, part in enumerate(parts) if not set(PHASES).isdisjoint(_SCOPE.findall(part))]
    # Recomputed blocks repeat their scope and its modules; the last occurrence counts.
    return '/'.join(
        part
        for part in parts[scopes[-1] + 1 if scopes else 0 :]
        if part.isidentifier() and part not in _BETWEEN
    )
