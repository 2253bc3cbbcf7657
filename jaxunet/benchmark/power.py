"""Power, energy and clock of an NVIDIA GPU during timed turns, read through NVML.

The extra `power` brings NVML's Python binding. Without it, or on a device without an energy
counter, rows have no such numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxunet.benchmark.timing import TURN_SECONDS
from jaxunet.runtime.rows import Row

NO_NUMBERS: Row = {'watts': None, 'clock_mhz': None, 'mj_per_image': None}


class Gpu(NamedTuple):
    """The counters of a GPU: its energy in mJ since the driver started, and its clock in MHz."""

    energy: Callable[[], int]
    clock: Callable[[], int]


class _Turn(NamedTuple):
    seconds: float
    millijoules: int
    clock: int | None


class Meter:
    """Measures the turns of several sides on one GPU; without a GPU, it measures nothing."""

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu = gpu
        self._turns: dict[str, list[_Turn]] = {}

    @contextlib.contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Measures what runs inside as a turn of this side, unless it raises."""
        if self._gpu is None:
            yield
            return
        read, clocks = self._gpu.clock, list[int]()
        # The clock in the middle of a turn is that of its steps; afterwards the GPU is idle.
        middle = threading.Timer(TURN_SECONDS / 2, lambda: clocks.append(read()))
        before, began = self._gpu.energy(), time.perf_counter()
        middle.start()
        try:
            yield
            seconds = time.perf_counter() - began
            used = self._gpu.energy() - before
        finally:
            middle.cancel()
            middle.join()
        self._turns.setdefault(name, []).append(_Turn(seconds, used, next(iter(clocks), None)))

    def numbers(self, name: str, images: int) -> Row:
        """Returns a side's mean power in W, median SM clock in MHz and mJ per image, or nulls.

        The energy counter advances every 20 to 100 ms, so only sums over turns are meant.

        Args:
          images: images of one turn.
        """
        turns = self._turns.get(name)
        if not turns:
            return NO_NUMBERS
        energy = sum(turn.millijoules for turn in turns)
        clocks = [turn.clock for turn in turns if turn.clock is not None]
        return {
            'watts': energy / 1e3 / sum(turn.seconds for turn in turns),
            'clock_mhz': float(np.median(clocks)) if clocks else None,
            'mj_per_image': energy / (images * len(turns)),
        }


def open_gpu() -> Gpu | None:
    """Returns the counters of JAX's first device; None if it lacks one or NVML cannot be read."""
    if jax.default_backend() != 'gpu':
        return None
    try:
        nvml: Any = importlib.import_module('pynvml')
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = _handle(nvml, jax.devices()[0].local_hardware_id)
        if nvml.nvmlDeviceGetName(handle) != jax.devices()[0].device_kind:
            return None  # CUDA and NVML number different GPUs in different orders
        gpu = Gpu(
            lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle),
            lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        )
        gpu.energy(), gpu.clock()  # some GPUs, such as virtual ones, lack a counter
    except nvml.NVMLError:
        return None
    return gpu


def _handle(nvml: Any, number: int) -> Any:
    """Returns NVML's handle of CUDA's device `number`, which CUDA_VISIBLE_DEVICES renumbers."""
    visible = os.environ.get('CUDA_VISIBLE_DEVICES', '')
    name = visible.split(',')[number].strip() if visible else str(number)
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
