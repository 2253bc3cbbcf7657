"""Options of XLA for compiling training steps. An option that XLA_FLAGS sets is not overridden."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax

from jaxunet.config import Config
from jaxunet.ops.backends import Kernels
from jaxunet.training.all_reduce import OVERLAP

Options = dict[str, str | bool]
# For several GPUs of one process: the kinds of operations that become part of a CUDA graph, which
# are the default of XLA in this version of JAX, and COLLECTIVES. Without these, a step has a graph
# for each part between two all-reduces. Runs of several processes keep the default, because
# COLLECTIVES were not tried on several hosts; on one host they would save 1%.
_GRAPHED = 'FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,COLLECTIVES'
if jax.__version_info__ >= (0, 12):
    _GRAPHED += ',COLLECTIVES_KERNEL'
WHOLE_GRAPH: Options = {'xla_gpu_enable_command_buffer': _GRAPHED}
# Kernels of a CUDA graph that do not depend on each other, such as those of a layer's two
# gradients, run at once. XLA can then share less memory between their results.
CONCURRENT: Options = {'xla_gpu_command_buffer_scheduling_mode': 'CONCURRENT'}


def compiler_options(config: Config, kernels: Kernels, devices: Sequence[jax.Device]) -> Options:
    """Returns `OVERLAP` and `WHOLE_GRAPH` on several GPUs, `CONCURRENT` where kernels overlap well.

    Args:
      devices: of all processes.
    """
    if devices[0].platform != 'gpu':
        return {}
    options: Options = {}
    if len(devices) > 1:
        options |= OVERLAP | (WHOLE_GRAPH if jax.process_count() == 1 else {})
    if kernels.overlap(config, len(devices)):
        options |= CONCURRENT
    flags = os.environ.get('XLA_FLAGS', '')
    return {name: value for name, value in options.items() if name not in flags}
