"""Keeps compiled training steps and samplers on disk, so that later starts need not compile.

The key of JAX's compilation cache is the lowered program, but tracing and lowering a UNet with
hand-written kernels already takes long. The key of this cache is a digest of everything that the
program is made from, so a hit skips tracing and lowering too. Without an exact match the program is
compiled.

As with JAX's cache, whoever can write to the folder can run code in this process. So a folder or
file that belongs to another user, or that others can write to, is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import flax
import jax
import jaxlib
import optax
from absl import logging
from jax.experimental import serialize_executable

from jaxunet.runtime import device, fingerprint, ownership, plugins, whole_files
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import cache_dir, expanded

KEPT = 24  # most files in the folder; the least recently used are removed first
SUFFIXES = ('.step', '.sampler')


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, in JAX_COMPILATION_CACHE_DIR or under `cache_dir()`.

    Programs that compile faster than JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS (default 0.5 s) are
    not kept. Warns and keeps none if there is no folder, if it cannot be made, or if others can
    write to it (`jaxunet.runtime.ownership`).
    """
    try:
        folder = expanded(os.environ.get('JAX_COMPILATION_CACHE_DIR') or str(cache_dir() / 'xla'))
        if '://' not in folder:
            pathlib.Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = '://' in folder or ownership.usable(folder)
    except (UserError, OSError) as error:
        logging.warning('compiled programs are not kept: %s', error)
        usable = False
    if not usable:
        jax.config.update('jax_enable_compilation_cache', False)
        return
    jax.config.update('jax_compilation_cache_dir', folder)
    if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
    logging.info('compilation cache: %s', folder)


def folder() -> pathlib.Path | None:
    """Returns the folder of the programs, inside JAX's compilation cache; None without a cache."""
    settings = jax.config.values
    directory = settings['jax_compilation_cache_dir']
    return (
        pathlib.Path(directory) / 'jaxunet_steps'
        if directory and settings['jax_enable_compilation_cache']
        else None
    )


def keeps(devices: Sequence[jax.Device], backends: Iterable[str]) -> bool:
    """Returns True if programs are kept: of a run of a single process on GPUs, with our kernels.

    Lowering hand-written kernels for a GPU takes long enough to make it worthwhile. But what the
    kernels of another package are made from is not known, so `key` cannot tell that they changed.

    Args:
      backends: those of the program's ops.
    """
    known = all(name == 'xla' or plugins.is_shipped(name) for name in backends)
    return known and jax.process_count() == 1 and devices[0].platform == 'gpu'


def key(
    fields: Mapping[str, object],
    arguments: tuple[object, ...],
    devices: Sequence[jax.Device],
    options: Mapping[str, object],
) -> str:
    """Returns the digest of everything that a program is made from.

    It includes the versions of the libraries, the settings of JAX and XLA, the kernels that
    JAXUNET_KERNELS asks for, and this source code.

    Args:
      fields: everything else that the program depends on, such as fields of the config.
      arguments: arrays that the program takes, such as (state, data); only their shapes, types and
        shardings count.
      options: the compiler's options and the steps per call.
    """
    leaves, tree = jax.tree.flatten(arguments)
    client = devices[0].client
    settings = {
        name: str(value) for name, value in jax.config.values.items() if 'cache' not in name
    }
    made_from = [
        fields,
        [  # arrays of random keys have no attribute weak_type
            [str(x.shape), str(x.dtype), str(x.sharding), getattr(x, 'weak_type', False)]
            for x in leaves
        ],
        str(tree),
        [[d.id, d.device_kind, str(getattr(d, 'compute_capability', ''))] for d in devices],
        [
            client.platform,
            client.platform_version,
            jax.__version__,
            jaxlib.__version__,
            flax.__version__,
            optax.__version__,
        ],
        options,
        settings,
        device.requested().value,
        {
            name: value
            for name, value in os.environ.items()
            if name.startswith(('XLA_FLAGS', 'JAX_', 'MOSAIC_', 'TRITON_'))
        },
        fingerprint.sources(),
    ]
    text = json.dumps(made_from, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(
    path: pathlib.Path,
    arguments: tuple[object, ...],
    devices: Sequence[jax.Device],
    result: object = None,
) -> jax.stages.Compiled | None:
    """Loads a program from a file; returns None if there is no such file or it is damaged.

    Args:
      arguments: what the program takes, such as (state, data).
      devices: the devices to run on.
      result: see `compiled`.
    """
    if not path.exists():
        return None
    began = time.perf_counter()
    try:
        with path.open('rb') as file:
            if reason := ownership.why_unsafe(os.fstat(file.fileno())):
                raise PermissionError(reason)
            header, _, payload = file.read().partition(b'\n')
        metrics = dict.fromkeys(json.loads(header)['metrics'], 0)
        in_tree = jax.tree.structure((arguments, {}))
        out_tree = jax.tree.structure((arguments[0], metrics) if result is None else result)
        step = serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, devices[0].client, devices
        )
        path.touch()
    except Exception as error:  # a damaged file can raise anything
        logging.warning(
            '%s: cannot be loaded (%s: %s); compiling again',
            path,
            type(error).__name__,
            str(error).split('\n')[0],
        )
        path.unlink(missing_ok=True)
        return None
    logging.info(
        'the compiled %s was loaded in %.1f s from %s',
        path.suffix[1:],
        time.perf_counter() - began,
        path,
    )
    return step


def save(path: pathlib.Path, program: jax.stages.Compiled, result: object = None) -> None:
    """Writes a program to a file; if that fails, only warns.

    A file holds the names of a step's metrics as a line of JSON, then the serialized executable.

    Args:
      result: see `compiled`.
    """
    try:
        payload, _, out_tree = serialize_executable.serialize(program)
        metrics = {}
        if result is None:
            _, metrics = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
        if not all(isinstance(leaf, int) for leaf in metrics.values()):
            raise TypeError('metrics are not a flat dictionary')
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with whole_files.replacing(path) as partial, partial.open('wb') as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps({'metrics': sorted(metrics)}).encode() + b'\n' + payload)
        kept = [p for p in path.parent.iterdir() if p.suffix in SUFFIXES]
        for old in sorted(kept, key=lambda p: p.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    except Exception as error:  # such as a full disk, or an executable that cannot be serialized
        logging.warning(
            '%s: the compiled %s cannot be kept (%s: %s)',
            path,
            path.suffix[1:],
            type(error).__name__,
            str(error).split('\n')[0],
        )


def compiled(
    build: Callable[[], jax.stages.Compiled],
    fields: Mapping[str, object],
    arguments: tuple[object, ...],
    devices: Sequence[jax.Device],
    options: Mapping[str, object],
    result: object = None,
) -> jax.stages.Compiled:
    """Loads the program from the folder; if it is not there, compiles it and writes it there.

    Args:
      build: compiles the program for the arguments.
      fields, options: see `key`.
      result: for a sampler, any tree with the structure of its result; None for a training step,
        which takes (state, data) and returns (state, metrics by name).
    """
    directory = folder()
    if directory is None or not ownership.usable(directory):
        return build()
    suffix = SUFFIXES[result is not None]
    path = directory / f'{key(fields, arguments, devices, options)}{suffix}'
    program = load(path, arguments, devices, result)
    if program is None:
        program = build()
        save(path, program, result)
    return program
