"""The PEP 517 build backend: scikit-build-core, which compiles what `plan` decides.

A build that compiles nothing needs neither a compiler nor further packages. Other builds need the
headers of jaxlib and pybind11, and nvcc from PyPI if the machine has none.
"""

from __future__ import annotations

import os
import shutil
import sys

import nvcc
import plan
from scikit_build_core import build as _build
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

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

# jaxlib provides the FFI headers. It is an old version, because a runtime rejects handlers built
# with newer headers.
HEADERS = ('pybind11>=3', 'jaxlib==0.7.2')
# The metapackage pins all parts to one release; nvcc alone would pull in newer parts that it is not
# compatible with.
TOOLKIT = 'cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==13.0.2'


def get_requires_for_build_wheel(config_settings: plan.Settings = None) -> list[str]:
    """Returns the packages that building a wheel needs."""
    decided = _decide(config_settings, 'pip install .')
    settings = _settings(config_settings, decided)
    return [*_build.get_requires_for_build_wheel(settings), *_requires(decided)]


def get_requires_for_build_editable(config_settings: plan.Settings = None) -> list[str]:
    """Returns the packages that an editable installation needs."""
    decided = _decide(config_settings, 'pip install -e .')
    settings = _settings(config_settings, decided)
    return [*_build.get_requires_for_build_editable(settings), *_requires(decided)]


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: plan.Settings = None
) -> str:
    """Writes the wheel's metadata. Returns the name of its folder."""
    settings = _settings(config_settings, _decide(config_settings, 'pip install .'))
    return _build.prepare_metadata_for_build_wheel(metadata_directory, settings)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: plan.Settings = None
) -> str:
    """Writes the metadata of an editable installation. Returns the name of its folder."""
    settings = _settings(config_settings, _decide(config_settings, 'pip install -e .'))
    return _build.prepare_metadata_for_build_editable(metadata_directory, settings)


def build_wheel(
    wheel_directory: str,
    config_settings: plan.Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds a wheel. Returns its file name."""
    settings = _start(config_settings, 'pip install .')
    return _build.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: plan.Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds the wheel of an editable installation. Returns its file name."""
    settings = _start(config_settings, 'pip install -e .')
    return _build.build_editable(wheel_directory, settings, metadata_directory)


def _decide(config_settings: plan.Settings, install: str) -> plan.Build:
    """Returns the plan. Ends the build if a variable is wrong or there is no C++ compiler.

    `install` is the command that the messages name.
    """
    try:
        decided = plan.decide(config_settings)
    except ValueError as error:
        raise SystemExit(f'jaxunet: {error}') from None
    if decided.part is not plan.Part.NOTHING and not _has_compiler():
        raise SystemExit(
            f'jaxunet: no C++ compiler found for {decided.part.value} ({decided.reason}). Install '
            f'one (apt install g++), or compile nothing: {plan.VARIABLE}=0 {install}; the backends '
            'xla and pallas need no compiler'
        )
    return decided


def _has_compiler() -> bool:
    names = [os.environ.get('CXX', ''), 'c++', 'g++', 'clang++', 'cl']
    return any(name and shutil.which(name.split()[0]) for name in names)


def _requires(decided: plan.Build) -> list[str]:
    if decided.part is plan.Part.NOTHING:
        return []
    # PyPI has nvcc only for Linux.
    wanted = decided.part is plan.Part.CUDA and sys.platform == 'linux' and nvcc.machine() is None
    return [*HEADERS, *([TOOLKIT] if wanted else [])]


def _settings(config_settings: plan.Settings, decided: plan.Build) -> dict[str, str | list[str]]:
    """Returns the user's settings for scikit-build-core, and what the plan adds to them."""
    given = config_settings or {}
    if decided.part is plan.Part.NOTHING:
        return {**given, 'wheel.cmake': 'false'}
    return {**given, 'cmake.define.JAXUNET_CUDA': 'ON' if decided.part is plan.Part.CUDA else 'OFF'}


def _start(config_settings: plan.Settings, install: str) -> dict[str, str | list[str]]:
    """Says what the build compiles. Returns its settings."""
    decided = _decide(config_settings, install)
    print(decided.line(install), flush=True)
    return _settings(config_settings, decided)
