"""The PEP 517 build backend: scikit-build-core, which also asks for nvcc from PyPI where the machine has none.

`-C wheel.cmake=false` leaves the compiled handlers out: the backends xla and pallas need none.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import nvcc
from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    'build_editable',
    'build_sdist',
    'build_wheel',
    'get_requires_for_build_editable',
    'get_requires_for_build_sdist',
    'get_requires_for_build_wheel',
    'prepare_metadata_for_build_editable',
    'prepare_metadata_for_build_wheel',
]

# The metapackage keeps the parts of one release together; nvcc alone would draw in newer ones that it cannot work with.
TOOLKIT = 'cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==13.0.2'
OFF = ('0', 'off', 'false', 'no')


Settings = dict[str, Any] | None


def _compiles(config_settings: Settings) -> bool:
    return str((config_settings or {}).get('wheel.cmake', 'true')).lower() not in OFF


def _requires(config_settings: Settings) -> list[str]:
    """nvcc, where it is wanted and missing."""
    wanted = (
        _compiles(config_settings)
        and sys.platform == 'linux'
        and os.environ.get('JAXUNET_CUDA', '1').lower() not in OFF
    )
    return [TOOLKIT] if wanted and nvcc.machine() is None else []


def _check(config_settings: Settings) -> None:
    names = [os.environ.get('CXX', ''), 'c++', 'g++', 'clang++', 'cl']
    if _compiles(config_settings) and not any(
        name and shutil.which(name.split()[0]) for name in names
    ):
        raise SystemExit(
            'jaxunet: no C++ compiler found for the handlers of backend=cuda and their CPU versions. Install one (apt install g++), '
            'or leave them out with: pip install -C wheel.cmake=false ...; the backends xla and pallas need none'
        )


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*_build.get_requires_for_build_wheel(config_settings), *_requires(config_settings)]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*_build.get_requires_for_build_editable(config_settings), *_requires(config_settings)]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    _check(config_settings)
    return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    _check(config_settings)
    return _build.build_editable(wheel_directory, config_settings, metadata_directory)
