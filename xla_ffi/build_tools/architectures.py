"""Decides for which GPU architectures the CUDA kernels are compiled.

CMake runs this file: it prints the list, or an error line on stderr and exits with 1.
"""

from __future__ import annotations

import os
import re
import sys

import gpus

VARIABLE = 'JAXUNET_CUDA_ARCHITECTURES'
# Machine code for 8.x, PTX for newer GPUs, and code with wgmma and TMA for 9.0.
ALL = '80;90a-real'
_ENTRY = re.compile(r'(?P<code>\d{2,3}a?)(-real|-virtual)?')


def choose(requested: str, capabilities: list[str], name: str = VARIABLE) -> str:
    """Returns a list of CMake's CUDA_ARCHITECTURES.

    Args:
      requested: '' for the GPUs found, 'all', or a list such as '80;90a-real'.
      capabilities: compute capabilities, as `gpus.find` returns them.
      name: the variable that holds `requested`, for errors.

    Raises:
      ValueError: the list has an entry that the kernels cannot be compiled for.
    """
    if not requested:
        return _of_gpus(capabilities)
    if requested == 'all':
        return ALL
    entries = [entry.strip() for entry in requested.split(';') if entry.strip()]
    for entry in entries:
        _check(entry, f'{name}={requested}')
    return ';'.join(entries)


def supported(capability: str) -> bool:
    """Returns True if the kernels run on a GPU: compute capability 8.0 or later."""
    return capability == gpus.UNKNOWN or int(capability.split('.', maxsplit=1)[0]) >= 8


def _of_gpus(capabilities: list[str]) -> str:
    usable = [capability for capability in capabilities if supported(capability)]
    if not usable or gpus.UNKNOWN in usable:
        return ALL
    return ';'.join(sorted({_of_gpu(capability) for capability in usable}))


def _of_gpu(capability: str) -> str:
    major, minor = capability.split('.')
    if capability == '9.0':
        return '90a-real'
    return f'8{minor}-real' if major == '8' else '80-virtual'  # the driver compiles it for newer


def _check(entry: str, given: str) -> None:
    match = _ENTRY.fullmatch(entry)
    if not match:
        expected = f'expected "all" or a list such as "{ALL}"'
        raise ValueError(f'{given}: {expected}, found "{entry}"')
    if match['code'] == '90':
        problem = 'the Hopper kernels (wgmma, TMA) need 90a; write "90a-real" instead of'
        raise ValueError(f'{given}: {problem} "{entry}"')
    if int(match['code'].rstrip('a')) < 80:
        problem = 'the kernels need compute capability 8.0 or later, found'
        raise ValueError(f'{given}: {problem} "{entry}"')


def main() -> int:
    """Prints the architectures for CMAKE_CUDA_ARCHITECTURES, the argument, or the environment."""
    asked, name = sys.argv[1], 'CMAKE_CUDA_ARCHITECTURES'
    if not asked:
        asked, name = os.environ.get(VARIABLE, ''), VARIABLE
    try:
        print(choose(asked, [] if asked else gpus.find(), name))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
