"""Compiles a training step for H100s on any machine, without a GPU.

    python tools/gpu/compile.py [--config configs/elephants64.py] [--precision float32]
      [--backend cuda] [--batch_size 32] [--devices 1] [--steps 20] [--passes 5] [--hlo FILE]

Shows the effects of a change before it costs time on a GPU: the seconds of lowering and compiling,
XLA's slowest passes, the memory, and the number of kernels of each kind that a step launches. The
compiled program, `--steps` steps in a loop, is written to the file of `--hlo`.

Needs the plug-in of the installed version of JAX (pip install "jax-cuda13-plugin[with-cuda]"), and,
for the CUDA kernels, a built checkout (JAXUNET_CUDA=1 pip install -e .). XLA cannot time matrix
products here, so it chooses others than on a GPU. Backends: xla, cuda, and mixes of both.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

CHILD = 'JAXUNET_COMPILES'  # the variable that is set in the process that compiles
# What XLA needs to know of a GPU, from the data sheet and `nvidia-smi -q` of an H100 SXM (80 GB).
H100 = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  device_vendor: "NVIDIA Corporation"
  model_str: "H100"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  platform_version: "Compute Capability 9.0a"
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000
  device_memory_size: 84942979072
  l2_cache_size: 52428800
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
PASS = re.compile(r'HLO pass: (\S+) time: .*?\((\d+) us\)')
INSTRUCTION = re.compile(
    r'^ +(?:ROOT )?%[\w.\-]+ = (?:\(.*?\)|\S+) '
    r'(custom-call|fusion|copy|all-reduce-start|all-reduce|sort)\('
)
TARGET = re.compile(r'custom_call_target="([^"]+)"')


def main() -> int:
    """Compiles in a child process and reads the times of XLA's passes from its messages."""
    options = flags()
    if CHILD in os.environ:
        compile_step(options)
        return 0
    with tempfile.TemporaryFile('w+') as messages:
        done = subprocess.run(
            [sys.executable, *sys.argv],
            env=os.environ
            | {CHILD: '1', 'JAX_PLATFORMS': 'cpu', 'JAX_ENABLE_COMPILATION_CACHE': 'false'}
            | {'TF_CPP_MIN_LOG_LEVEL': '0', 'TF_CPP_VMODULE': 'hlo_pass_pipeline=1'},
            stderr=messages,
            check=False,
        )
        messages.seek(0)
        lines = messages.read().splitlines()
    if done.returncode:
        print(*[line for line in lines if 'hlo_pass_pipeline' not in line][-30:], sep='\n')
        return done.returncode
    for name, seconds in slowest(lines, options.passes):
        print(f'pass {name}: {seconds:.2f} s')
    return 0


def flags() -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--config', default='configs/elephants64.py')
    parser.add_argument('--precision', help='default: that of the config')
    parser.add_argument('--backend', default='cuda')
    parser.add_argument('--batch_size', type=int, help='default: that of the config')
    parser.add_argument('--devices', type=int, default=1)
    parser.add_argument('--steps', type=int, default=1, help='steps of a call')
    parser.add_argument('--passes', type=int, default=5, help="how many of XLA's passes to print")
    parser.add_argument('--hlo', type=pathlib.Path, help='file for the compiled program')
    options = parser.parse_args()
    if 'pallas' in options.backend:
        parser.error('--backend: expected xla, cuda or a mix of both; Pallas compiles on a GPU')
    return options


def slowest(lines: Iterable[str], count: int) -> list[tuple[str, float]]:
    """Returns the passes that took longest, and their seconds, from XLA's messages."""
    seconds: collections.Counter[str] = collections.Counter()
    for line in lines:
        if match := PASS.search(line):
            seconds[match[1]] += int(match[2]) / 1e6
    return seconds.most_common(count)


def launches(program: str) -> collections.Counter[str]:
    """Counts what a compiled program launches: custom calls by their target, the rest by kind.

    A loop's body counts once.
    """
    counts: collections.Counter[str] = collections.Counter()
    fused = False  # True inside a computation that a fusion calls, which is part of its kernel
    for line in program.splitlines():
        if line.endswith('{') and not line.startswith(' '):
            fused = 'computation' in line.split('(')[0]
        elif not fused and (match := INSTRUCTION.match(line)):
            target = TARGET.search(line)
            counts[target[1] if target else match[1]] += 1
    return counts


def compile_step(options: argparse.Namespace) -> None:
    """Lowers and compiles the step; prints times, memory and launches."""
    import jax  # noqa: PLC0415

    from jaxunet.checkpoint.optimizer import make_optimizer  # noqa: PLC0415
    from jaxunet.checkpoint.store import state_template  # noqa: PLC0415
    from jaxunet.config import resolve  # noqa: PLC0415
    from jaxunet.diffusion.process import make_diffusion  # noqa: PLC0415
    from jaxunet.model.unet import build_unet  # noqa: PLC0415
    from jaxunet.ops.backends import choose  # noqa: PLC0415
    from jaxunet.runtime import device  # noqa: PLC0415
    from jaxunet.training.parallel import Parallel  # noqa: PLC0415
    from jaxunet.training.step import make_train_step  # noqa: PLC0415

    config = resolve(runpy.run_path(options.config)['get_config']())
    config = config.replace(backend=options.backend, parallel={'devices': options.devices})
    if options.precision:
        config = config.replace(precision=options.precision)
    if options.batch_size:
        config = config.replace(data={'batch_size': options.batch_size})
    gpus = h100s(options.devices)
    jax.devices = lambda *_: gpus
    jax.local_device_count = lambda *_: len(gpus)
    device.target = lambda: device.Target.HOPPER
    device.multiprocessors = lambda _: 132
    kernels = choose(config.backend, config.precision, here=False)
    parallel = Parallel(config, kernels)
    model = build_unet(config, kernels.ops)
    diffusion, optimizer = make_diffusion(config.diffusion), make_optimizer(config)
    lead = (options.steps,) if options.steps > 1 else ()
    images = (*lead, config.data.batch_size, *config.image_shape)
    data = {
        'image': jax.ShapeDtypeStruct(images, 'uint8'),
        'label': jax.ShapeDtypeStruct(images[: len(lead) + 1], 'int32'),
    }
    began = time.perf_counter()
    lowered = parallel.lower(
        lambda axis: make_train_step(config, model, diffusion, optimizer, kernels, axis_name=axis),
        parallel.replicated_shapes(state_template(config)),
        data,
        options.steps,
    )
    lower, began = time.perf_counter() - began, time.perf_counter()
    compiled = lowered.compile(compiler_options=parallel.compiler_options)
    print(f'lower {lower:.1f} s, compile {time.perf_counter() - began:.1f} s', flush=True)
    memory: Any = compiled.memory_analysis()
    gib = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30
    print(f'memory {gib:.2f} GiB, {memory.temp_size_in_bytes / 2**30:.2f} of it temporary')
    text = compiled.as_text()
    for name, count in launches(text).most_common():
        print(f'{count:5d} {name}')
    if options.hlo:
        options.hlo.write_text(text)


def h100s(count: int) -> list[Any]:
    """Returns devices to compile for; they cannot run anything.

    Raises:
      SystemExit: JAX's plug-in for CUDA is not installed.
    """
    from jax.experimental import topologies  # noqa: PLC0415

    try:
        import jax_plugins.xla_cuda13 as plugin  # noqa: PLC0415
    except ImportError:
        sys.exit('error: JAX\'s plug-in is missing: pip install "jax-cuda13-plugin[with-cuda]"')
    plugin.initialize()
    topology = topologies.get_topology_desc(
        'h100', 'cuda', target_config=H100, topology=f'1x{count}x1'
    )
    return list(topology.devices)


if __name__ == '__main__':
    sys.exit(main())
