"""Compiled training steps, kept on disk, so that the next start of the same run neither traces, lowers nor compiles.

JAX's compilation cache is looked up with the lowered program, and tracing and lowering a UNet of hand-written kernels alone takes longer
than a user likes to wait. A step is kept beside that cache, under a digest of all that it is made from; what does not fit exactly is
made anew. As with JAX's cache, who can write to the folder can run code here: it is the user's own.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jaxlib
import optax
from absl import logging
from jax.experimental import serialize_executable

from jaxunet.runtime import fingerprint

KEPT = 24  # files; the least recently used go first
Step = Callable[..., Any]


def folder() -> pathlib.Path | None:
    """Where steps are kept: beside the programs of JAX's compilation cache; None if that is off."""
    settings = jax.config.values
    directory = settings['jax_compilation_cache_dir']
    return (
        pathlib.Path(directory) / 'jaxunet_steps'
        if directory and settings['jax_enable_compilation_cache']
        else None
    )


def key(
    made_of: dict[str, Any], arguments: Any, devices: Sequence[jax.Device], options: dict[str, Any]
) -> str:
    """The digest of what a step is made from: the fields of its config, arguments' shapes and shardings, devices, versions, settings, and this code.

    Args:
      options: what else it was made with: the compiler's options, the steps of a call.
    """
    leaves, tree = jax.tree.flatten(arguments)
    client = devices[0].client
    settings = {
        name: str(value) for name, value in jax.config.values.items() if 'cache' not in name
    }
    made_from = [
        made_of,
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
    path: pathlib.Path, arguments: tuple[Any, Any], devices: Sequence[jax.Device]
) -> jax.stages.Compiled | None:
    """The step kept in a file, for arguments (state, data); it returns a state and metrics. None if there is none, or a damaged one."""
    if not path.exists():
        return None
    began = time.perf_counter()
    try:
        header, _, payload = path.read_bytes().partition(b'\n')
        metrics = dict.fromkeys(json.loads(header)['metrics'], 0)
        in_tree = jax.tree.structure((arguments, {}))
        out_tree = jax.tree.structure((arguments[0], metrics))
        step = serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, devices[0].client, devices
        )
        path.touch()
    except Exception as error:  # whatever a damaged file leads to
        logging.warning(
            '%s: cannot be loaded (%s: %s); compiling anew',
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
    """Keeps a step whose result is (state, metrics by name). What cannot be kept costs a warning."""
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
    except Exception as error:  # a full disk, or an executable that this backend cannot serialize
        logging.warning(
            '%s: the compiled step cannot be kept (%s: %s)',
            path,
            type(error).__name__,
            str(error).split('\n')[0],
        )


def compiled(
    build: Callable[[], jax.stages.Compiled],
    made_of: dict[str, Any],
    arguments: tuple[Any, Any],
    devices: Sequence[jax.Device],
    options: dict[str, Any],
) -> jax.stages.Compiled:
    """The step that `build` compiles for (state, data), from the folder if it is there, else built and put there."""
    directory = folder()
    if directory is None:
        return build()
    path = directory / f'{key(made_of, arguments, devices, options)}.step'
    step = load(path, arguments, devices)
    if step is None:
        step = build()
        save(path, step)
    return step
