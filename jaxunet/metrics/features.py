"""Feature networks: what turns images into the vectors that every metric compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxunet.data.pixels import Batch, Pixels
from jaxunet.data.source import Source
from jaxunet.data.threads import ordered_map
from jaxunet.metrics import classifier, inception
from jaxunet.metrics.arrays import array_names, read_arrays
from jaxunet.metrics.inception_weights import (
    SHA256_PREFIX,
    SUFFIXES,
    find_or_download,
    read_parameters,
)
from jaxunet.runtime import download
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.progress import progress_bar

CLASSIFIER = 'classifier'
KIND = 'jaxunet_features'  # an array with this name tells which reader of READERS a file belongs to


@dataclass(frozen=True)
class FeatureNetwork:
    """A network and how it is told apart from others.

    Fields:
      name: for labels of results; a word that also tells the weights, such as `inception-6726825d`.
      dimension: of the features.
      extract: uint8 (n, height, width, 3), all n alike -> float32 (n, dimension); compiled by itself for each shape.
      is_inception: whether it is FID's Inception-v3; only then results are called FID, KID and Inception Score.
      resize: what happens to the images' size, for people.
      classify: features -> class scores (n, classes), where there are some.
      size: (height, width) of the only images that it takes; None = any, which it resizes.
    """

    name: str
    dimension: int
    extract: Callable[[UInt8[np.ndarray, 'n height width 3']], Float[Array, 'n d']]
    is_inception: bool
    resize: str
    classify: Callable[[Float[np.ndarray, 'n d']], Float[Array, 'n classes']] | None = None
    size: tuple[int, int] | None = None

    def check_size(self, found: tuple[int, int]) -> None:
        """Raises UserError: images of this (height, width) are not what the network takes."""
        if self.size and found != self.size:
            raise UserError(
                f'--features: {self.name} compares images of {self.size[0]}x{self.size[1]} pixels, found {found[0]}x{found[1]}'
            )


def load_features(features: str) -> FeatureNetwork:
    """The network that `--features` asks for.

    Args:
      features: `inception` (pytorch-fid's weights from the cache folder, or downloaded into it), or a file: Inception's weights as
        .pth, .pt, .npz or .safetensors, or an .npz whose array `jaxunet_features` names another kind in `READERS`.

    Raises:
      UserError: no such file, no network connection, a file of another kind, or a damaged one.
    """
    path = find_or_download() if features == 'inception' else Path(features).expanduser()
    if not path.is_file():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = near_misses(features, ['inception']) or near_misses(path.name, siblings)
        raise UserError(
            f'--features: expected inception or a file that ends in {", ".join(SUFFIXES)}, found no file {features!r}{hint}'
        )
    try:
        digest = download.digest(path, 'sha256')
    except OSError as error:
        raise UserError(
            f'{path}: cannot be read: {error.strerror or error}; check its permissions'
        ) from None
    if path.suffix.lower() == '.npz' and KIND in array_names(path):
        arrays = read_arrays(path)
        kind = str(arrays.pop(KIND))
        if kind not in READERS:
            raise UserError(
                f'{path}: {KIND}: expected {" or ".join(READERS) or "none"}, found {kind!r}{near_misses(kind, READERS)}'
            )
        return READERS[kind](path, arrays, digest)
    return inception_network(read_parameters(path), digest)


def inception_network(params: inception.Parameters, digest: str) -> FeatureNetwork:
    """FID's Inception-v3 with these parameters; `digest` is the SHA-256 of their file."""
    known = (
        "pytorch-fid's weights"
        if digest.startswith(SHA256_PREFIX)
        else f"not the file of pytorch-fid's weights, {SHA256_PREFIX}"
    )
    extract, classify = (
        jax.jit(inception.features),
        jax.jit(lambda p, x: inception.logits(p, x, bias=False)),
    )
    return FeatureNetwork(
        name=f'inception-{digest[:8]}',
        dimension=inception.DIMENSION,
        extract=lambda images: extract(params, images),
        is_inception=True,
        resize=f'bilinear to {inception.SIDE}x{inception.SIDE}, no antialiasing; {known}',
        classify=lambda features: classify(params, features),
    )


def classifier_network(path: Path, arrays: dict[str, np.ndarray], digest: str) -> FeatureNetwork:
    """A file of `jaxunet.metrics.train_features`. Raises UserError: a damaged one; and from `extract`, images of another size."""
    architecture, params, statistics, scale, training = classifier.from_arrays(str(path), arrays)

    @jax.jit
    def run(images: UInt8[Array, 'n height width 3']) -> Float[Array, 'n d']:
        x = classifier.normalise(architecture, images)
        return (
            classifier.apply(architecture, params, x, statistics, precision=lax.Precision.HIGHEST)[
                1
            ]
            * scale[None]
        )

    network = FeatureNetwork(
        name=f'{CLASSIFIER}-{digest[:8]}',
        dimension=len(scale),
        extract=run,
        is_inception=False,
        resize=f'none; trained on {training.get("reference")}, test accuracy {training.get("test_accuracy", float("nan")):.4f}',
        size=(architecture.height, architecture.width),
    )

    def extract(images: UInt8[np.ndarray, 'n height width 3']) -> Float[Array, 'n d']:
        network.check_size((images.shape[1], images.shape[2]))
        return run(images)

    return dataclasses.replace(network, extract=extract)


# kind -> reader of the file's arrays; the third argument is the SHA-256 of the file.
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
) -> Iterator[Float[np.ndarray, 'n d']]:
    """Activation of the images at `rows`, a batch at a time, in order; images are decoded in threads while the device works.

    Raises:
      BadImage: a corrupt image.
    """
    with progress_bar(total=len(rows), unit='image', desc=name) as bar:
        for images in _loaded(source, rows, batch_size):
            count = len(images)
            full = images
            if (
                count < batch_size < len(rows)
            ):  # the last one: a full batch needs no second compilation
                full = np.concatenate(
                    [images, np.zeros((batch_size - count, *images.shape[1:]), np.uint8)]
                )
            yield np.asarray(network.extract(full))[:count]
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
