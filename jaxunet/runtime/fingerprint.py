"""A digest of the source code, on which results and compiled programs depend."""

from __future__ import annotations

import functools
import hashlib
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ('jaxunet', 'pallas_kernels', 'xla_ffi')
SUFFIXES = ('.py', '.so', '.cu', '.cuh', '.cc', '.h', '.json', '.jsonl')


@functools.cache
def sources() -> str:
    """Returns the SHA-256 of all source files of the project's packages, as hexadecimal digits.

    Computed once per process.
    """
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted(p for p in (ROOT / package).rglob('*') if p.suffix in SUFFIXES):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()
