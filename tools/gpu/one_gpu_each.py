"""Gives each worker of pytest-xdist one of the visible GPUs, in turn.

A pytest plugin (`-p one_gpu_each`), which must be imported before JAX. CUDA_VISIBLE_DEVICES lists
the GPUs. Without it, or without workers, nothing changes.
"""

import os

worker, visible = (os.environ.get(n, '') for n in ('PYTEST_XDIST_WORKER', 'CUDA_VISIBLE_DEVICES'))
if worker and visible:
    gpus = visible.split(',')
    os.environ['CUDA_VISIBLE_DEVICES'] = gpus[int(worker.removeprefix('gw')) % len(gpus)]
