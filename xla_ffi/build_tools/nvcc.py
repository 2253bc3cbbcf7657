"""Prints the path of nvcc: this machine's, else that of the NVIDIA wheels in this Python.

Prints an empty line if there is none.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil


def machine() -> str | None:
    """Returns nvcc from CUDACXX, PATH, CUDA_HOME, CUDA_PATH or the usual folder, in this order."""
    roots = [os.environ.get('CUDA_HOME'), os.environ.get('CUDA_PATH'), '/usr/local/cuda']
    candidates = [
        os.environ.get('CUDACXX'),
        shutil.which('nvcc'),
        *(f'{root}/bin/nvcc' for root in roots if root),
    ]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def wheels() -> str | None:
    """Returns nvcc from the PyPI wheels, which unpack into the namespace package nvidia.cu13."""
    try:
        spec = importlib.util.find_spec('nvidia.cu13')
    except ModuleNotFoundError:
        return None
    folders = (spec and spec.submodule_search_locations) or []
    return next(
        (
            str(path)
            for folder in folders
            if (path := pathlib.Path(folder, 'bin', 'nvcc')).is_file()
        ),
        None,
    )


if __name__ == '__main__':
    print(machine() or wheels() or '')
