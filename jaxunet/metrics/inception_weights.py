"""Reads the weights of FID's Inception from a file, or downloads them into the cache folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxunet.metrics.arrays import read_arrays
from jaxunet.metrics.inception import Parameters, torch_shapes
from jaxunet.metrics.torch_legacy import START, read_legacy
from jaxunet.runtime.download import cached
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import cache_dir
from jaxunet.runtime.untrusted import one_line
from jaxunet.weights.safetensors_file import SafetensorsFile
from jaxunet.weights.torch_file import TorchFile

FILE = 'pt_inception-2015-12-05-6726825d.pth'
URL = f'https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{FILE}'
# SHA-256 of the published file; the file's name has the first eight digits. torch-fidelity's
# release v0.2.0 has the same file (95,628,359 bytes, the same digits in its name), and other
# programs print its whole digest.
SHA256 = '6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2'
SUFFIXES = ('.pth', '.pt', '.npz', '.safetensors')
MAX_BYTES = 2**29  # of a file, read at once; far above the 96 MB of Inception's
IGNORED = 'num_batches_tracked'  # torch's counter of training steps, in some files


def from_state(state: Mapping[str, np.ndarray], name: str) -> Parameters:
    """Checks a state dict against the network and converts it to our layouts, float32.

    Args:
      state: tensors by torch's names, in torch's layouts.
      name: name of the file; error messages begin with it.

    Raises:
      UserError: a tensor is missing, unknown, of a wrong shape or not finite, or has negative
        variances.
    """
    described = f"FID's Inception-v3 under pytorch-fid's names ({FILE})"
    weights = checked(state, torch_shapes(), name, described)
    turned = {k: v.transpose(2, 3, 1, 0) if v.ndim == 4 else v.T for k, v in weights.items()}
    return {k: jnp.asarray(np.ascontiguousarray(v, np.float32)) for k, v in turned.items()}


def checked(
    state: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    name: str,
    described: str,
) -> dict[str, np.ndarray]:
    """Returns the tensors of a state dict that a network has, in the order of `shapes`.

    Args:
      shapes: names and shapes of all of them.
      name: name of the file; error messages begin with it.
      described: the network and the origin of the names, for messages.

    Raises:
      UserError: as `from_state`.
    """
    weights = {key: value for key, value in state.items() if not key.endswith(IGNORED)}
    missing, extra = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing or extra:
        raise UserError(
            f'{name}: expected the {len(shapes)} tensors of {described}; {len(missing)} are '
            f'missing ({", ".join(missing[:3])}) and {len(extra)} unknown '
            f'({", ".join(map(one_line, extra[:3]))})'
        )
    for key, shape in shapes.items():
        value = weights[key]
        if value.shape != shape:
            raise UserError(f'{name}: {key}: expected shape {shape}, found {value.shape}')
        if not np.isfinite(value).all():
            raise UserError(
                f'{name}: {key}: expected finite numbers, found NaN or infinity; '
                'the file is damaged'
            )
        if key.endswith('running_var') and (value < 0).any():
            raise UserError(
                f'{name}: {key}: expected variances of 0 or more, found {value.min()}; '
                'the file is damaged'
            )
    return {key: weights[key] for key in shapes}


def find_or_download(features: str = 'inception') -> Path:
    """Returns the published weights in the cache folder, downloading them if they are not there.

    Args:
      features: `inception` or `inception_tensorflow`. For `inception`, messages can advise giving
        the path of a file instead.

    Raises:
      UserError: no connection, no disk space, or a wrong checksum.
    """
    instead = f'put it into {cache_dir()}'
    if features == 'inception':
        instead = (
            f'give its path (--features /path/to/{FILE}, or --config.evaluation.features for what '
            f'a config measures), or {instead}'
        )
    instead += (
        '; or train features on images with classes, by python -m jaxunet.metrics.train_features, '
        'and give their file'
    )
    return cached(
        URL,
        FILE,
        algorithm='sha256',
        checksum=SHA256,
        asked_by=f'features={features}',
        instead=instead,
    )


def read_state(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a state dict by their names; nothing in the file is executed.

    Args:
      path: .pth or .pt (`torch.save`, old or new format), .npz or .safetensors.

    Raises:
      UserError: the file is damaged, of another kind or larger than `MAX_BYTES`.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(
            f'{path}: expected a file of features that ends in {", ".join(SUFFIXES)}, '
            f'found {path.suffix!r}'
        )
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UserError(
                f'{path}: expected weights of features in at most {MAX_BYTES:,} bytes, found '
                f'{size:,}; give a file of the network alone'
            )
        with path.open('rb') as file:
            if path.suffix.lower() == '.safetensors':
                tensors = SafetensorsFile(str(path), file)
                return {name: tensors.read(name) for name in tensors.shapes}
            if path.suffix.lower() == '.npz':
                return read_arrays(path)
            if file.read(2) == START:
                return read_legacy(str(path), file)
            file.seek(0)
            with TorchFile(str(path), file) as state:
                return {name: state.read(name) for name in state.shapes}
    except OSError as error:
        raise UserError(f'{path}: cannot be read: {error.strerror or error}') from None
