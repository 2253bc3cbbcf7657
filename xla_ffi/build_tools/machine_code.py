"""Digests of the machine code of every kernel in a built `_cuda*.so`.

A refactoring of the CUDA sources must not change what the GPU runs. Each kernel is reduced to a
digest of its instruction words. Names, addresses and file names are left out, so a kernel may be
renamed or moved to another file. Two builds hold the same machine code if their sorted lists of
digests are equal.

    python xla_ffi/build_tools/machine_code.py _cuda.so
        prints one line per kernel: architecture, digest, name
    python xla_ffi/build_tools/machine_code.py _cuda.so --write FILE
        writes the record that xla_ffi/test_machine_code.py compares
    python xla_ffi/build_tools/machine_code.py _cuda.so --compare FILE
        prints what differs from a record; exits with 1 if anything does

Needs `cuobjdump` and `nvdisasm` of the CUDA toolkit on PATH (PyPI: nvidia-cuda-cuobjdump,
nvidia-cuda-nvdisasm). Their version does not matter, but nvcc's does.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

ARCHITECTURE = re.compile(r'^\s*code for (\S+)')
FUNCTION = re.compile(r'^\s*Function : (\S+)')
WORD = re.compile(r'/\* (0x[0-9a-f]{16}) \*/\s*$')
COMPILER = re.compile(rb'Cuda compilation tools, release [\d.]+, V([\d.]+)')
DIGITS = 12  # hexadecimal; a collision among a few hundred kernels has a probability below 1e-9


class Kernel(NamedTuple):
    """One kernel: its architecture, the digest of its instructions, and its mangled name."""

    architecture: str
    digest: str
    name: str


def kernels(listing: Iterable[str]) -> Iterator[Kernel]:
    """Reads the output of `cuobjdump -sass`."""
    architecture, name, digest = '', '', None
    for line in listing:
        if word := WORD.search(line):
            assert digest is not None, line
            digest.update(word[1].encode())
        elif match := ARCHITECTURE.match(line) or FUNCTION.match(line):
            if digest is not None:
                yield Kernel(architecture, digest.hexdigest()[:DIGITS], name)
            digest = None
            if match.re is ARCHITECTURE:
                architecture = match[1]
            else:
                name, digest = match[1], hashlib.sha256()
    if digest is not None:
        yield Kernel(architecture, digest.hexdigest()[:DIGITS], name)


def missing_tools() -> list[str]:
    """Returns the tools that PATH lacks."""
    return [tool for tool in ('cuobjdump', 'nvdisasm') if shutil.which(tool) is None]


def read(module: pathlib.Path) -> list[Kernel]:
    """Returns the kernels of a module, sorted.

    Raises:
      RuntimeError: cuobjdump fails, or finds no kernel.
    """
    with subprocess.Popen(
        ['cuobjdump', '-sass', str(module)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None, 'asked for with PIPE'
        compiled = sorted(kernels(process.stdout))
    if process.returncode or not compiled:
        raise RuntimeError(
            f'{module}: cuobjdump ended with status {process.returncode} and '
            f'{len(compiled)} kernels'
        )
    return compiled


def compiler(module: pathlib.Path) -> str:
    """Returns the version of the nvcc that built a module, such as 13.0.88; '' if unknown."""
    versions = set(COMPILER.findall(module.read_bytes()))
    return versions.pop().decode() if len(versions) == 1 else ''


def by_architecture(compiled: Iterable[Kernel]) -> dict[str, list[str]]:
    """Architecture -> sorted digests, with repetitions."""
    digests: dict[str, list[str]] = {}
    for kernel in compiled:
        digests.setdefault(kernel.architecture, []).append(kernel.digest)
    return {architecture: sorted(digests[architecture]) for architecture in sorted(digests)}


def differences(compiled: list[Kernel], recorded: dict[str, list[str]]) -> list[str]:
    """Returns one line for each kernel that the record lacks, and one for the digests without a
    kernel.
    """
    lines = []
    present = by_architecture(compiled)
    for architecture in sorted(present.keys() | recorded.keys()):
        new = collections.Counter(present.get(architecture, [])) - collections.Counter(
            recorded.get(architecture, [])
        )
        gone = collections.Counter(recorded.get(architecture, [])) - collections.Counter(
            present.get(architecture, [])
        )
        for kernel in compiled:
            if kernel.architecture == architecture and new[kernel.digest] > 0:
                new[kernel.digest] -= 1
                lines.append(f'{architecture}: {kernel.digest} is not in the record: {kernel.name}')
        if gone:
            lines.append(
                f'{architecture}: {gone.total()} recorded digests have no kernel: '
                f'{", ".join(sorted(gone))}'
            )
    return lines


def main() -> int:
    """Prints or compares digests; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('module', type=pathlib.Path, help='a built _cuda*.so')
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        '--write', type=pathlib.Path, metavar='FILE', help='write the record as JSON'
    )
    group.add_argument('--compare', type=pathlib.Path, metavar='FILE', help='compare with a record')
    options = parser.parse_args()
    if missing := missing_tools():
        parser.error(
            f'{" and ".join(missing)} not found on PATH: '
            'install the CUDA toolkit, or its wheels from PyPI'
        )
    if not options.module.is_file():
        parser.error(f'{options.module}: no such file; build the extension first')
    compiled = read(options.module)
    if options.write:
        record = {'nvcc': compiler(options.module), 'architectures': by_architecture(compiled)}
        options.write.write_text(json.dumps(record, indent=0) + '\n')
    elif options.compare:
        lines = differences(compiled, json.loads(options.compare.read_text())['architectures'])
        print('\n'.join(lines) or f'{len(compiled)} kernels: the same machine code')
        return 1 if lines else 0
    else:
        print('\n'.join(' '.join(kernel) for kernel in compiled))
    return 0


if __name__ == '__main__':
    sys.exit(main())
