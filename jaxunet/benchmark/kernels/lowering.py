"""Lowers measurements in other processes, because lowering is Python and threads do not help."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import jax

from jaxunet.benchmark.kernels import adamw, attention, conv3x3, group_norm, linear, project
from jaxunet.runtime import device
from jaxunet.runtime.measurement import Measurement
from jaxunet.runtime.plugins import load_backend

# By the cost of lowering, cheapest first.
KINDS: dict[str, ModuleType] = {
    'adamw': adamw,
    'project': project,
    'linear': linear,
    'attention': attention,
    'group_norm': group_norm,
    'conv3x3': conv3x3,
}
CUSTOM_CALL = 'mosaic_gpu_v2'


class Lowered(NamedTuple):
    """The Pallas side of a measurement, serialized by `jax.export`, and its processor seconds."""

    exported: bytes
    seconds: float


def lower(name: str, batch: int, dtype: str, device_kind: str) -> Lowered:
    """Lowers the Pallas side of a measurement for a Hopper GPU, which need not be present."""
    m = next(
        m
        for kind in KINDS.values()
        for m in kind.measurements(batch, dtype, [load_backend('pallas')])
        if m.name == name
    )
    began = time.thread_time()
    checks = [jax.export.DisabledSafetyCheck.custom_call(CUSTOM_CALL)]
    with device.use(device.Target.HOPPER, device_kind):
        exported = jax.export.export(
            jax.jit(m.sides['pallas']), platforms=['cuda'], disabled_checks=checks
        )(m.inputs)
    return Lowered(bytes(exported.serialize()), time.thread_time() - began)


def _on_cpu() -> None:
    """Keeps a worker from allocating the GPU's memory."""
    jax.config.update('jax_platforms', 'cpu')


def pool(workers: int | None = None) -> concurrent.futures.ProcessPoolExecutor:
    """Returns a pool of processes for `lower`; by default two fewer than there are cores."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 2
    )
    workers = workers or max(1, cores - 2)
    return concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context('spawn'), initializer=_on_cpu
    )


def start(
    workers: concurrent.futures.ProcessPoolExecutor,
    wanted: Sequence[Measurement],
    dtype: str,
    device_kind: str,
) -> dict[tuple[str, str], concurrent.futures.Future[Lowered]]:
    """Starts lowering the Pallas sides of measurements; returns futures by measurement and side."""
    lowered = {}
    # If the pool breaks, the rest is lowered in this process.
    with contextlib.suppress(concurrent.futures.BrokenExecutor):
        for m in (m for m in wanted if 'pallas' in m.sides):
            lowered[m.name, 'pallas'] = workers.submit(lower, m.name, m.batch, dtype, device_kind)
    return lowered
