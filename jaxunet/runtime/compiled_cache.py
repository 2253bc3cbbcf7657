"""Keeps compiled training steps on disk, so that the next start of a run need not compile.

JAX's compilation cache is looked up with the lowered program, and tracing and lowering a UNet of
hand-written kernels takes long by itself. This cache is looked up with a digest of everything that
the step is made from, so that a hit skips tracing and lowering too. Whatever does not match exactly
is compiled again.

As with JAX's cache, whoever can write to the folder can run code in this process. So it belongs to
the user alone: a folder or file of another user, or that others can write to, is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import flax
import jax
import jaxlib
import optax
from absl import logging
from jax.experimental import serialize_executable

from jaxunet.runtime import fingerprint, ownership

KEPT = 24  # files; the least recently used are removed first


def folder() -> pathlib.Path | None:
    """Returns the folder of the steps, inside JAX's compilation cache; None if that is off."""
    settings = jax.config.values
    directory = settings['jax_compilation_cache_dir']
    return (
        pathlib.Path(directory) / 'jaxunet_steps'
        if directory and settings['jax_enable_compilation_cache']
        else None
    )


def key(
    fields: Mapping[str, object],
    arguments: tuple[object, object],
    devices: Sequence[jax.Device],
    options: Mapping[str, object],
) -> str:
    """Returns the digest of everything that a step is made from.

    That is also the versions of the libraries, the settings of JAX and XLA, and this source code.

    Args:
      fields: the fields of the config that the step depends on.
      arguments: (state, data), whose shapes, types and shardings count.
      options: the compiler's options and the steps per call.
    """
    leaves, tree = jax.tree.flatten(arguments)
    client = devices[0].client
    settings = {
        name: str(value) for name, value in jax.config.values.items() if 'cache' not in name
    }
    made_from = [
        fields,
        [[str(x.shape), str(x.dtype), str(x.sharding), x.weak_type] for x in leaves],
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
        {
            name: value
            for name, value in os.environ.items()
            if name.startswith(('XLA_FLAGS', 'JAX_', 'MOSAIC_', 'TRITON_'))
        },
        fingerprint.sources(),
    ]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True, default=str).encode()).hexdigest()[
        :32
    ]


def load(
    path: pathlib.Path, arguments: tuple[object, object], devices: Sequence[jax.Device]
) -> jax.stages.Compiled | None:
    """Loads a step from a file; None if there is no such file or it is damaged.

    Args:
      arguments: (state, data). The step returns a state and metrics.
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
        out_tree = jax.tree.structure((arguments[0], metrics))
        step = serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, devices[0].client, devices
        )
        path.touch()
    except Exception as error:  # a damaged file can lead to any
        logging.warning(
            '%s: cannot be loaded (%s: %s); compiling again',
            path,
            type(error).__name__,
            str(error).split('\n')[0],
        )
        path.unlink(missing_ok=True)
        return None
    logging.info(
        'the compiled step was loaded in %.1f s from %s', time.perf_counter() - began, path
    )
    return step


def save(path: pathlib.Path, step: jax.stages.Compiled) -> None:
    """Writes a step whose result is (state, metrics by name); warns if that is not possible.

    A file holds the names of the metrics as a line of JSON, then the serialized executable.
    """
    try:
        payload, _, out_tree = serialize_executable.serialize(step)
        _, metrics = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
        if not all(isinstance(leaf, int) for leaf in metrics.values()):
            raise TypeError('metrics are not a flat dictionary')
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(json.dumps({'metrics': sorted(metrics)}).encode() + b'\n' + payload)
        os.replace(file.name, path)
        for old in sorted(path.parent.glob('*.step'), key=lambda p: p.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    except Exception as error:  # such as a full disk, or an executable that cannot be serialized
        logging.warning(
            '%s: the compiled step cannot be kept (%s: %s)',
            path,
            type(error).__name__,
            str(error).split('\n')[0],
        )


def compiled(
    build: Callable[[], jax.stages.Compiled],
    fields: Mapping[str, object],
    arguments: tuple[object, object],
    devices: Sequence[jax.Device],
    options: Mapping[str, object],
) -> jax.stages.Compiled:
    """Returns the step from the folder, or else compiles it and keeps it there.

    Args:
      build: compiles the step for the arguments (state, data).
      fields, options: as for `key`.
    """
    directory = folder()
    if directory is None or not ownership.usable(directory):
        return build()
    path = directory / f'{key(fields, arguments, devices, options)}.step'
    step = load(path, arguments, devices)
    if step is None:
        step = build()
        save(path, step)
    return step
