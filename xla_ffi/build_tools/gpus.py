"""Finds the NVIDIA GPUs of this machine without a CUDA toolkit and without JAX."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

UNKNOWN = 'unknown'
DRIVER = pathlib.Path('/proc/driver/nvidia/gpus')  # one folder per GPU


def find() -> list[str]:
    """Returns the compute capability of every GPU, such as ['9.0', '9.0'].

    A GPU that the driver lists but that nvidia-smi does not describe counts as `UNKNOWN`.
    """
    if (capabilities := _ask_nvidia_smi()) is not None:
        return capabilities
    return [UNKNOWN for _ in DRIVER.iterdir()] if DRIVER.is_dir() else []


def _ask_nvidia_smi() -> list[str] | None:
    """Returns the output of nvidia-smi; None if it is missing or fails."""
    program = shutil.which('nvidia-smi')
    if program is None:
        return None
    command = [program, '--query-gpu=compute_cap', '--format=csv,noheader']
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return [line if re.fullmatch(r'\d+\.\d+', line) else UNKNOWN for line in lines]
