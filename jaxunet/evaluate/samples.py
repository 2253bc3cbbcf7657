"""Measures the images of --samples against those of --reference."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxunet.checkpoint import model_flags
from jaxunet.data.sources import check_path
from jaxunet.evaluate import nearest
from jaxunet.evaluate.flags import (
    BATCH_SIZE,
    FEATURES,
    METRIC_NAMES,
    MODEL,
    NUM_SAMPLES,
    OUTPUT,
    REFERENCE,
    SEED,
)
from jaxunet.evaluate.nearest import NEAREST
from jaxunet.evaluate.output import append, check_outputs
from jaxunet.metrics.evaluation import Result, check_metrics, compute
from jaxunet.metrics.features import FeatureNetwork, load_features
from jaxunet.metrics.frechet import save_statistics
from jaxunet.metrics.image_sets import Size
from jaxunet.metrics.kernel_distance import SUBSET_SIZE, SUBSETS
from jaxunet.metrics.sides import open_side
from jaxunet.metrics.table import with_reference
from jaxunet.runtime import compiled_cache
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import of_user

KID_SUBSETS = flags.DEFINE_integer(
    'kid_subsets',
    SUBSETS,
    'kid: random subsets to average over; 0 compares all images at once.',
    lower_bound=0,
)
KID_SUBSET_SIZE = flags.DEFINE_integer(
    'kid_subset_size', SUBSET_SIZE, 'kid: images per subset, at most all.', lower_bound=2
)
WRITE_STATISTICS = flags.DEFINE_string(
    'write_statistics',
    None,
    "fid: write the reference's statistics to this .npz, for a later --reference; with sfid in "
    '--metrics also those.',
)
of_user(WRITE_STATISTICS)
# Flags that are not used with --checkpoint.
ONLY = ('nearest', 'image_size', 'kid_subsets', 'kid_subset_size', 'write_statistics')


def evaluate(samples: str) -> None:
    """Computes --metrics of images, finds the --nearest ones, and prints and appends the results.

    Raises:
      UserError: a wrong flag, path or image.
    """
    metrics = METRIC_NAMES.value if METRIC_NAMES.present or not NEAREST.value else []
    if metrics or not NEAREST.value:
        check_metrics(metrics)
    compared = with_reference(metrics)
    needed = [*compared, *(['--nearest'] if NEAREST.value else [])]
    if needed and not REFERENCE.value:
        raise UserError(f'--reference: missing; needed by {", ".join(needed)}')
    nearest.check()
    statistics = WRITE_STATISTICS.value
    if statistics and ('fid' not in metrics or not statistics.lower().endswith('.npz')):
        raise UserError(
            '--write_statistics: expected a name that ends in .npz, and fid in --metrics, '
            f'found {statistics!r}'
        )
    size = _image_size()
    check_outputs([OUTPUT, NEAREST, WRITE_STATISTICS])
    compiled_cache.enable_compilation_cache()
    for path in (samples, REFERENCE.value):
        check_path(path or '')  # before Inception is downloaded
    network = load_features(FEATURES.value)
    results = _measure(samples, metrics, compared, network, size) if metrics else []
    for result in results:
        print(result.line(), flush=True)
    if NEAREST.value and REFERENCE.value:
        results += nearest.find(samples, REFERENCE.value, NEAREST.value, network, size)
    append(result.row() for result in results)


def _measure(
    samples: str,
    metrics: Sequence[str],
    compared: Sequence[str],
    network: FeatureNetwork,
    size: Size | None,
) -> list[Result]:
    """Computes `metrics`; `compared` are those that need the reference."""
    check_metrics(metrics, network)
    options = {'batch_size': BATCH_SIZE.value, 'seed': SEED.value}
    with contextlib.ExitStack() as stack:
        # Open both sides before computing features, so that a wrong path fails at once.
        reference_side, reference_images = None, None
        if compared and REFERENCE.value:
            opened = open_side(
                REFERENCE.value,
                compared,
                network,
                '--reference',
                grid_size=size,
                is_reference=True,
                **options,
            )
            reference_side, reference_images = stack.enter_context(opened)
        opened = open_side(
            samples,
            metrics,
            network,
            '--samples',
            grid_size=size or reference_images,
            count=NUM_SAMPLES.value,
            is_reference=False,
            **options,
        )
        samples_side, _ = stack.enter_context(opened)
        reference = reference_side() if reference_side else None
        measured = samples_side()
    if WRITE_STATISTICS.value and reference is not None and reference.statistics is not None:
        target = Path(WRITE_STATISTICS.value)
        save_statistics(target, reference.statistics, reference.spatial)
    return compute(
        metrics,
        network,
        measured,
        reference,
        seed=SEED.value,
        kid_subsets=KID_SUBSETS.value,
        kid_subset_size=KID_SUBSET_SIZE.value,
    )


def _image_size() -> Size | None:
    """Returns --image_size as (height, width)."""
    given = MODEL.stated['image_size'].value
    if given is None:
        return None
    size = model_flags.parse_size('image_size', given)
    return size[0], size[-1]
