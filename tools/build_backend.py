"""The PEP 517 build backend: scikit-build-core, which also asks for nvcc from PyPI where the machine has none."""

from __future__ import annotations

import os
import sys
from typing import Any

import nvcc
from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
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


def _compiler() -> list[str]:
    wanted = sys.platform == 'linux' and os.environ.get('JAXUNET_CUDA', '1').lower() not in OFF
    return [TOOLKIT] if wanted and nvcc.machine() is None else []


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_build.get_requires_for_build_wheel(config_settings), *_compiler()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_build.get_requires_for_build_editable(config_settings), *_compiler()]
