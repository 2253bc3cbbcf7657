"""Runs a function in a thread beside the training steps, where that is safe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from jaxunet.runtime.background import Background

Result = TypeVar('Result')


def beside_steps(
    function: Callable[[], Result], devices: Sequence[jax.Device]
) -> Background[Result]:
    """Starts a function that compiles or runs programs, beside the training steps that follow.

    If the steps run on several GPUs of this process, it waits for the function. Some CUDA calls,
    such as freeing memory, wait for all GPUs of a process. If one of them waits for an all-reduce
    on one GPU, and the launch on another GPU waits for this call, training hangs for ever.
    Source: "Debugging Hangs", https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/GPU_performance.md

    Args:
      devices: devices of this process on which the steps run.

    Raises what the function raised, if it waits.
    """
    background = Background(function)
    if _several_gpus(devices):
        background.wait()
    return background


def _several_gpus(devices: Sequence[jax.Device]) -> bool:
    return len(devices) > 1 and devices[0].platform == 'gpu'
