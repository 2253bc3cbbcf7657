"""Finds the training images nearest to samples, for --nearest."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from jaxunet.evaluate.flags import BATCH_SIZE, NUM_SAMPLES, SEED
from jaxunet.metrics.evaluation import Result
from jaxunet.metrics.features import FeatureNetwork
from jaxunet.metrics.image_sets import Size
from jaxunet.metrics.nearest import compare, write
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import of_user

NEAREST = flags.DEFINE_string(
    'nearest',
    None,
    'Find the nearest image of --reference, the training images, for each sample; write a picture '
    'of the closest pairs to this .png and a table of all beside it, and print the share of '
    'copies.',
)
of_user(NEAREST)


def check() -> None:
    """Checks the value of --nearest.

    Raises:
      UserError: it does not name a .png.
    """
    if NEAREST.value and not NEAREST.value.lower().endswith('.png'):
        raise UserError(f'--nearest: expected a name that ends in .png, found {NEAREST.value!r}')


def find(
    samples: str, reference: str, output: str, network: FeatureNetwork, size: Size | None
) -> list[Result]:
    """Writes the picture and the table of --nearest; prints and returns the shares of copies.

    Args:
      samples, reference: paths of the images.
      output: path of the picture.
      network: network whose features are compared, in addition to pixels.
      size: (height, width) of the images of a .png grid.
    """
    comparison = compare(
        samples,
        reference,
        network,
        grid_size=size,
        count=NUM_SAMPLES.value,
        seed=SEED.value,
        batch_size=BATCH_SIZE.value,
    )
    for result in comparison.results:
        print(result.line(), flush=True)
    picture = Path(output)
    table = write(picture, comparison)
    print(f'the closest pairs are in {picture}, all of them in {table}', flush=True)
    return comparison.results
