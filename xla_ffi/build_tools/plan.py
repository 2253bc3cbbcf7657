"""Decides what an installation compiles: nothing, the CPU handlers, or the CUDA kernels too."""

from __future__ import annotations

import enum
import os
import sys
from typing import NamedTuple

import architectures
import gpus

VARIABLE = 'JAXUNET_CUDA'
OFF = ('0', 'off', 'false', 'no')
ON = ('1', 'on', 'true', 'yes')

Settings = dict[str, str | list[str]] | None


class Part(enum.Enum):
    """The compiled part of an installation."""

    NOTHING = 'nothing'
    CPU = 'the CPU handlers'  # the checks of the CUDA kernels' operands, and slow results for tests
    CUDA = 'the CPU handlers and the CUDA kernels'


class Build(NamedTuple):
    """The part to compile, the reason, and the architectures ('' without CUDA)."""

    part: Part
    reason: str
    architectures: str = ''

    def line(self, install: str) -> str:
        """Returns one line for the log; `install` is the command without JAXUNET_CUDA."""
        target = f' for {self.architectures}' if self.architectures else ''
        said = f'jaxunet: compiles {self.part.value}{target} ({self.reason})'
        if self.part is Part.CUDA:
            return said
        return f'{said}; the CUDA kernels of backend=cuda are built by: {VARIABLE}=1 {install}'


def decide(settings: Settings) -> Build:
    """Returns the plan for pip's config settings, the environment and the GPUs of this machine.

    Raises:
      ValueError: a variable of the environment has an unknown value.
    """
    requested = os.environ.get(VARIABLE, '').lower()
    if requested not in ('', 'cpu', *OFF, *ON):
        raise ValueError(
            f'{VARIABLE}={requested}: expected 1 (CUDA kernels), cpu (CPU handlers alone), '
            '0 (compile nothing), or unset (CUDA kernels where there is an NVIDIA GPU)'
        )
    if str((settings or {}).get('wheel.cmake', 'true')).lower() in OFF:
        return Build(Part.NOTHING, 'wheel.cmake=false')
    if requested in OFF:
        return Build(Part.NOTHING, f'{VARIABLE}={requested}')
    if requested == 'cpu':
        return Build(Part.CPU, f'{VARIABLE}=cpu')
    targets = os.environ.get(architectures.VARIABLE, '')
    capabilities = [] if targets else gpus.find()
    chosen = architectures.choose(targets, capabilities)
    if requested or targets:
        named = f'{VARIABLE}={requested}' if requested else f'{architectures.VARIABLE}={targets}'
        return Build(Part.CUDA, named, chosen)
    if sys.platform != 'linux':
        return Build(Part.NOTHING, f'on {sys.platform} and {VARIABLE} is not set')
    if not capabilities:
        return Build(Part.NOTHING, f'no NVIDIA GPU and {VARIABLE} is not set')
    listed = 'GPUs of compute capability ' + ', '.join(sorted(set(capabilities)))
    if not any(map(architectures.supported, capabilities)):
        return Build(Part.NOTHING, f'{listed}; the kernels need 8.0 or later')
    return Build(Part.CUDA, listed, chosen)
