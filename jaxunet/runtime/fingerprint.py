"""What a result or a compiled program of this code depends on, as digests."""

from __future__ import annotations

import functools
import hashlib
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ('jaxunet', 'pallas_kernels', 'xla_ffi')
SUFFIXES = ('.py', '.so', '.cu', '.cuh', '.cc', '.h', '.json', '.jsonl')


@functools.cache
def sources() -> str:
    """Of all files of this project's packages, as they were when first asked."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted(p for p in (ROOT / package).rglob('*') if p.suffix in SUFFIXES):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()
