"""What an operation is for and whose kernel it is, from its names: phases of the training step, kernel backends, collectives."""

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
# What JAX's transformations and loops put between the names of modules.
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
    """The phase of an operation, one of `PHASES`, from its scope path; collectives are told by their name (`is_collective`).

    The training step (`jaxunet.training.step`) names its scopes data, forward, backward, optimizer; the gradient of what ran in a scope
    has it wrapped in `transpose(...)` by JAX, as in `jit(whole)/transpose(jvp(forward))/UNet/middle_res_0/dot_general`.
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
    """The stable name, `jaxunet_...`, of a kernel of the project within its kernel or instruction name; '' for others.

    A kernel of the CUDA library, `jaxunet::cuda::...::NAME<...>(...)`, is called `jaxunet_cuda_NAME`, whatever its template arguments.
    """
    if library := next((match for name in names if (match := _CUDA_KERNEL.search(name))), None):
        return f'jaxunet_{CUDA}_{library[1]}'
    found = next((match[0] for name in names if (match := _OWN.search(name))), '')
    return found.removesuffix('_mosaic_gpu_kernel')  # appended by Pallas


def backend_of(*names: str) -> str:
    """The backend (xla, pallas or cuda) that wrote a kernel, from its kernel and instruction names.

    `own_name` is `jaxunet_cuda_...` for kernels of the CUDA library; other `jaxunet_...` are Pallas's.
    """
    own = own_name(*names)
    return CUDA if own.startswith(f'jaxunet_{CUDA}_') else PALLAS if own else XLA


def is_collective(*names: str) -> bool:
    """Whether devices talk to each other in it, by its opcode, instruction or kernel name."""
    return any(name.lower().startswith(_COLLECTIVES) for name in names)


def module_of(path: str) -> str:
    """The part of a scope path that names the place in the model, e.g. `UNet/up_0_res_1`; '' outside modules.

    Left out are the last component, which is the primitive, functions (`jit(...)`, `UNet._embed`) and JAX's transformations.
    """
    parts = path.partition(';')[0].split('/')[:-1]
    scopes = [i for i, part in enumerate(parts) if not set(PHASES).isdisjoint(_SCOPE.findall(part))]
    # Recomputed blocks name their scope, and the modules in it, a second time.
    return '/'.join(
        part
        for part in parts[scopes[-1] + 1 if scopes else 0 :]
        if part.isidentifier() and part not in _BETWEEN
    )
