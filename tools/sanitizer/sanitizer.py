"""The small cases of every kernel for compute-sanitizer, in pieces that fit into a limited time.

It also computes the digest of what they run. `sanitizer_run` runs a piece, `sanitizer_output` reads
the output of the tool, and `sanitizer_rows` reads rows. `sanitizer_ports` gives simultaneous runs
different ports. `tools/sanitizer/sanitize.py` is the command.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxunet.runtime.rows import Row
from tools.sanitizer import tested_sources

ROOT = pathlib.Path(__file__).resolve().parents[2]
SANITIZER = 'compute-sanitizer'
TOOLS = ('memcheck', 'racecheck', 'synccheck', 'initcheck')
KERNELS = ('fastest', 'portable')  # values of JAXUNET_KERNELS
FLAGS = (
    *('--print-limit', '20', '--target-processes', 'all'),
    *('--kernel-name-exclude', 'kernel_substring=xla'),
)
PYTEST_FLAGS = ('-q', '-n', '0', '-m', '', '-p', 'no:benchmark', '-p', 'no:cacheprovider')
XLA_FLAGS = '--xla_gpu_autotune_level=0'


class Op(NamedTuple):
    """The tests of an op: a file, and the expression that selects its small cases (pytest -k)."""

    path: str
    select: str


OPS = {
    'cuda attention': Op(
        'xla_ffi/attention/parity_test.py',
        'awkward or (hopper_shapes and (b1- or b2- or b3- or b5-)) or (every_case and 16_tokens)',
    ),
    'cuda conv3x3': Op(
        'xla_ffi/conv3x3/parity_test.py',
        'awkward or activation_inside or other_readers or of_their_own or without_pixels '
        'or side_by_side or (every_case and (64x64_64to3 or 64x64_3to64)) '
        'or (through_the_norm and not identical and (not every_tile or 33x35))',
    ),
    'cuda upsample_conv3x3': Op(
        'xla_ffi/conv3x3/test_upsampled.py',
        'by_phases or other_calls or (every_tile and (b1- or b2- or b3- or b5-))',
    ),
    'cuda group_norm': Op(
        'xla_ffi/group_norm/parity_test.py',
        'awkward or (other_readers and not every_kernel) or statistics or in_registers '
        'or activation_again or from_sums or (large_images and (57x57 or 31x33)) '
        'or (dropout_inside and (34x33 or 61x41 or 16x16_192))',
    ),
    'cuda linear': Op('xla_ffi/linear/parity_test.py', 'awkward or gradients_have'),
    'cuda projections': Op('xla_ffi/projections/parity_test.py', 'awkward or without_samples'),
    'cuda weight_gradients': Op('xla_ffi/weight_gradients/parity_test.py', 'small'),
    'cuda adamw': Op(
        'xla_ffi/adamw/parity_test.py',
        'awkward or identical or (every_case and many) or not_taken or are_kept '
        'or sum_of_squares or narrow_as_astype or packed_as',
    ),
    'pallas attention': Op('pallas_kernels/attention/parity_test.py', 'awkward'),
    'pallas conv3x3': Op(
        'pallas_kernels/conv3x3/parity_test.py', 'awkward or (every_case and 4x4_256)'
    ),
    'pallas group_norm': Op('pallas_kernels/group_norm/parity_test.py', 'awkward'),
}


def ops_of(kernels: str) -> list[str]:
    """Returns the ops that have kernels of a value of JAXUNET_KERNELS."""
    return [op for op in OPS if kernels == 'fastest' or not op.startswith('pallas')]


class Piece(NamedTuple):
    """Tests that run in one process.

    Fields:
      first: index of its first test among all tests of the op.
      of: number of tests of the op.
      digest: digest of the names of all tests of the op, so that rows of other tests do not count.
    """

    tool: str
    op: str
    kernels: str
    first: int
    tests: tuple[str, ...]
    of: int
    digest: str

    def row(self) -> Row:
        """Returns the fields of a row that identify the piece."""
        return self._asdict() | {'tests': len(self.tests)}

    def title(self) -> str:
        """Returns the name of the piece for messages, which count cases from 1."""
        cases = f'cases {self.first + 1} to {self.first + len(self.tests)} of {self.of}'
        return f'{self.tool}, {self.op}, {self.kernels}, {cases}'

    def cases(self) -> range:
        """Returns the indices of its tests among all tests of the op."""
        return range(self.first, self.first + len(self.tests))

    def part(self, begin: int, end: int) -> Piece:
        """Returns the piece with the tests from index `begin` up to but not including `end`."""
        return self._replace(first=self.first + begin, tests=self.tests[begin:end])


def collect(op: Op) -> list[str]:
    """Returns the names of an op's small cases.

    Raises:
      RuntimeError: pytest selects no test.
    """
    command = [sys.executable, '-m', 'pytest', '--collect-only', '-q', '-n', '0', '-m', '']
    done = subprocess.run(
        [*command, op.path, '-k', op.select],
        cwd=ROOT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        check=False,
    )
    names = [line for line in done.stdout.splitlines() if '::' in line]
    if not names:
        raise RuntimeError(f'{op.path}: no test is selected by -k "{op.select}"\n{done.stdout}')
    return names


def pieces(
    tools: Sequence[str],
    ops: Sequence[str],
    kernels: Sequence[str],
    size: int,
    find: Callable[[Op], list[str]] = collect,
) -> Iterator[Piece]:
    """Yields the pieces of at most `size` tests."""
    tests = {op: find(OPS[op]) for op in ops}
    for kind in kernels:
        for tool in tools:
            for op in (op for op in ops_of(kind) if op in tests):
                names = tests[op]
                digest = hashlib.sha256('\n'.join(names).encode()).hexdigest()[:12]
                for first in range(0, len(names), size):
                    part = tuple(names[first : first + size])
                    yield Piece(tool, op, kind, first, part, len(names), digest)


def code(op: str, origin: Row) -> str:
    """Returns a digest of everything that determines what the tests of an op run.

    It covers the files that `tested_sources.files` finds by imports and #include lines, the flags
    of the tools, and, as far as the origin has them, the device and the versions of jax, nvcc and
    compute-sanitizer.

    Args:
      op: name of the op.
      origin: a row, or the fields that describe the origin of rows.
    """
    versions = [origin.get('versions', {}).get('jax')]
    versions += [origin.get(name) for name in ('device', 'nvcc', 'sanitizer')]
    told = [tested_sources.digest(OPS[op].path), FLAGS, PYTEST_FLAGS, XLA_FLAGS, versions]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
