"""Compares samples with real images.

    python -m jaxunet.evaluate --samples samples/ --reference cifar10: --metrics fid,kid,recall

Each side is anything that `data.path` accepts, with all its images of one size; the samples may
also be a .png grid of `jaxunet.sample`. For `fid`, either side may be an .npz of statistics
(mu, sigma) in pytorch-fid's format, or one of ADM's reference batches, whose statistics serve `fid`
and `sfid` and whose images serve the others. Every result states how it was computed.

    python -m jaxunet.evaluate --samples samples/ --reference photos.zip --nearest pairs.png

tells which samples repeat a training image, and shows each beside its nearest ones.

    python -m jaxunet.evaluate --checkpoint runs/photos --ema 0.03,0.05,0.10,0.15 --plot widths.png

draws the samples itself, with each of these averages of the weights, as the section `evaluation` of
the run's config says.

    python -m jaxunet.evaluate --checkpoint runs/cifar10 --metrics nll --reference test/

bounds the likelihood of images under a model, in bits per dimension; also under one in a weight
file, with --preset or the flags of jaxunet.sample that say what the file leaves open.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxunet.checkpoint import model_flags
from jaxunet.config import cli, split_backend
from jaxunet.config.relations import METRICS
from jaxunet.data.sources import check_exists
from jaxunet.metrics.evaluation import Result, check_metrics, compute
from jaxunet.metrics.features import FeatureNetwork, load_features
from jaxunet.metrics.frechet import save_statistics
from jaxunet.metrics.image_sets import Size
from jaxunet.metrics.kernel_distance import SUBSET_SIZE, SUBSETS
from jaxunet.metrics.nearest import compare, write
from jaxunet.metrics.sides import open_side
from jaxunet.metrics.table import with_reference
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.whole_files import check_writable
from jaxunet.sampling.options import VARIANCES
from jaxunet.training.average_sweep import check_plot, measure_averages, plot
from jaxunet.training.likelihood import LikelihoodOptions, measure_likelihood, save_terms

NLL = 'nll'
SAMPLES = flags.DEFINE_string(
    'samples',
    None,
    'Images of one size: folder, archive, .npz or .png grid; or an .npz of statistics.',
)
REFERENCE = flags.DEFINE_string(
    'reference',
    None,
    'Real images of one size, or an .npz of statistics; needed with --samples, except for '
    'inception_score. With --checkpoint, the default is the training images.',
)
METRIC_NAMES = flags.DEFINE_list(
    'metrics',
    ['fid'],
    f'Metrics to compute, some of {", ".join(METRICS)}; with --nearest only those given. Or '
    f'{NLL}, with --checkpoint: the variational bound in bits per dimension.',
)
FEATURES = flags.DEFINE_string(
    'features',
    'inception',
    "inception (downloads pytorch-fid's weights once), inception_tensorflow (the same, with images "
    "prepared as by ADM's evaluator), or a file: of these weights, or of "
    'python -m jaxunet.metrics.train_features.',
)
BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', 64, 'Images per call of the feature network; nll: of the model.', lower_bound=1
)
NUM_SAMPLES = flags.DEFINE_integer(
    'num_samples',
    None,
    'With --samples: use this many of them, drawn at random; default: all. With --checkpoint: the '
    "number to draw; default: the run's evaluation.samples. nll: use this many of the images; "
    'default: all.',
    lower_bound=1,
)
SEED = flags.DEFINE_integer(
    'seed',
    0,
    'Seed of all random choices, such as the samples drawn with --checkpoint.',
    lower_bound=0,
)
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
NEAREST = flags.DEFINE_string(
    'nearest',
    None,
    'Find the nearest image of --reference, the training images, for each sample; write a picture '
    'of the closest pairs to this .png and a table of all beside it, and print the share of '
    'copies.',
)
OUTPUT = flags.DEFINE_string(
    'output', None, 'Append the results to this file, one JSON object per line.'
)

CHECKPOINT = flags.DEFINE_string(
    'checkpoint',
    None,
    'Instead of --samples: a workdir or a checkpoint to draw them from, as the section evaluation '
    'of its config says; --metrics, --features, --reference, --num_samples and --seed replace the '
    "run's fields where they are given. With --metrics nll also a weight file.",
)
MODEL = model_flags.define(
    'nll: config of the model in a weight file that does not state it.',
    image_size_help=" For a .png grid: size of its images; default: the reference's.",
)
flags.adopt_module_key_flags(model_flags)  # so that --help lists them
EMA = flags.DEFINE_list(
    'ema',
    None,
    'With --checkpoint: the averages to evaluate, each as --ema of jaxunet.sample, such as '
    "0.03,0.05,0.10,none; default: the run's first rate.",
)
PLOT = flags.DEFINE_string(
    'plot', None, 'With --checkpoint: draw the metrics over the widths of --ema to this .png.'
)
BACKEND = flags.DEFINE_string(
    'backend', None, "With --checkpoint: as config.backend; default: the run's."
)
VARIANCE = flags.DEFINE_enum(
    'variance',
    None,
    VARIANCES,
    'nll: variance of the model; default: learned if it has it, else fixed_small.',
)
RESPACING = flags.DEFINE_string(
    'respacing', None, 'nll: fewer timesteps, as --respacing of jaxunet.sample; default: all.'
)
CLIP = flags.DEFINE_bool('clip', True, 'nll: clip the predicted image to [-1, 1].')
TERMS = flags.DEFINE_string('terms', None, 'nll: write the terms of the bound to this .npz.')

# Flags that only one of --samples and --checkpoint has.
OF_SAMPLES = (
    'nearest',
    'batch_size',
    'image_size',
    'kid_subsets',
    'kid_subset_size',
    'write_statistics',
)
OF_CHECKPOINTS = ('ema', 'plot', 'backend')
OF_MODEL = ('config', 'preset', 'new_attention_order', *sorted({*MODEL.stated} - {'image_size'}))
OF_NLL = ('variance', 'respacing', 'clip', 'terms', *OF_MODEL)
NOT_OF_NLL = ('features', 'plot')


def main(argv: Sequence[str]) -> None:
    """Checks the flags, computes the metrics, prints them and appends them to --output.

    Raises:
      UserError: a wrong flag, path or image.
    """
    _check_sources()
    if METRIC_NAMES.value == [NLL]:
        assert CHECKPOINT.value is not None
        _evaluate_likelihood(CHECKPOINT.value)
        return
    if CHECKPOINT.value:
        _evaluate_checkpoint(CHECKPOINT.value)
        return
    metrics = METRIC_NAMES.value if METRIC_NAMES.present or not NEAREST.value else []
    if metrics or not NEAREST.value:
        check_metrics(metrics)
    compared = with_reference(metrics)
    needed = [*compared, *(['--nearest'] if NEAREST.value else [])]
    if needed and not REFERENCE.value:
        raise UserError(f'--reference: missing; needed by {", ".join(needed)}')
    if NEAREST.value and not NEAREST.value.lower().endswith('.png'):
        raise UserError(f'--nearest: expected a name that ends in .png, found {NEAREST.value!r}')
    statistics = WRITE_STATISTICS.value
    if statistics and ('fid' not in metrics or not statistics.lower().endswith('.npz')):
        raise UserError(
            '--write_statistics: expected a name that ends in .npz, and fid in --metrics, '
            f'found {statistics!r}'
        )
    size = _image_size()
    for flag in (OUTPUT, NEAREST):
        if flag.value:
            _check_writable(flag.name, Path(flag.value).expanduser())
    cli.enable_compilation_cache()
    for path in (SAMPLES.value, REFERENCE.value):
        if path and not path.endswith(':'):  # before Inception is downloaded
            check_exists(Path(path.removeprefix('cifar10:')).expanduser())
    network = load_features(FEATURES.value)
    results = _measure(metrics, compared, network, size) if metrics else []
    for result in results:
        print(result.line(), flush=True)
    if NEAREST.value and REFERENCE.value:
        results += _find_nearest(REFERENCE.value, NEAREST.value, network, size)
    if OUTPUT.value:
        _append(OUTPUT.value, [json.dumps(result.row()) for result in results])


def _find_nearest(
    reference: str, output: str, network: FeatureNetwork, size: Size | None
) -> list[Result]:
    """Writes the picture and the table of --nearest, and prints the shares of copies."""
    assert SAMPLES.value is not None
    comparison = compare(
        SAMPLES.value,
        reference,
        network,
        grid_size=size,
        count=NUM_SAMPLES.value,
        seed=SEED.value,
        batch_size=BATCH_SIZE.value,
    )
    for result in comparison.results:
        print(result.line(), flush=True)
    picture = Path(output).expanduser()
    table = write(picture, comparison)
    print(f'the closest pairs are in {picture}, all of them in {table}', flush=True)
    return comparison.results


def _check_sources() -> None:
    """Checks that --samples or --checkpoint is given, and no flag that only the other one has."""
    if bool(SAMPLES.value) == bool(CHECKPOINT.value):
        found = 'both' if SAMPLES.value else 'none'
        raise UserError(f'--samples, --checkpoint: expected one of them, found {found}')
    given, other = ('samples', 'checkpoint') if SAMPLES.value else ('checkpoint', 'samples')
    nll = NLL in METRIC_NAMES.value
    if nll and (METRIC_NAMES.value != [NLL] or SAMPLES.value):
        raise UserError(
            f'--metrics: {NLL} needs a model, --checkpoint, and a command of its own; '
            f'found {",".join(METRIC_NAMES.value)} with --{given}'
        )
    for name in OF_CHECKPOINTS if SAMPLES.value else OF_SAMPLES:
        if flags.FLAGS[name].present and not (nll and name in ('batch_size', 'image_size')):
            raise UserError(f'--{name}: only --{other} has it; leave it out with --{given}')
    for name in NOT_OF_NLL if nll else OF_NLL:
        if flags.FLAGS[name].present:
            kind = 'not with' if nll else 'only with'
            raise UserError(f'--{name}: {kind} --metrics {NLL}; leave it out')


def _evaluate_likelihood(path: str) -> None:
    """Bounds the likelihood of --reference, prints the results, and writes --output and --terms."""
    averages = EMA.value or ['']
    for flag in (OUTPUT, TERMS):
        if flag.value:
            _check_writable(flag.name, Path(flag.value).expanduser())
    if TERMS.value and (not TERMS.value.lower().endswith('.npz') or len(averages) > 1):
        raise UserError(
            '--terms: expected a name that ends in .npz, and at most one --ema, '
            f'found {TERMS.value!r} and {len(averages)}'
        )
    if BACKEND.value is not None:
        split_backend(BACKEND.value, '--backend')
    options = LikelihoodOptions(
        reference=REFERENCE.value or '',
        num_samples=NUM_SAMPLES.value,
        variance=VARIANCE.value,
        respacing=RESPACING.value,
        clip=CLIP.value,
        batch_size=BATCH_SIZE.value,
        seed=SEED.value,
        backend=BACKEND.value,
    )
    cli.enable_compilation_cache()
    for found in measure_likelihood(path, averages, options, **MODEL.given()):
        print(found.result.line(), flush=True)
        if OUTPUT.value:
            _append(OUTPUT.value, [json.dumps(found.result.row())])
        if TERMS.value:
            save_terms(Path(TERMS.value).expanduser(), found)


def _evaluate_checkpoint(path: str) -> None:
    """Measures the averages of --ema, prints and appends their results, and draws --plot."""
    if METRIC_NAMES.present:
        check_metrics(METRIC_NAMES.value)
    for flag in (OUTPUT, PLOT):
        if flag.value:
            _check_writable(flag.name, Path(flag.value).expanduser())
    if PLOT.value:
        check_plot(PLOT.value, EMA.value or [])
    if BACKEND.value is not None:
        split_backend(BACKEND.value, '--backend')
    replaced: dict[str, flags.FlagHolder] = {
        'metrics': METRIC_NAMES,
        'features': FEATURES,
        'reference': REFERENCE,
        'samples': NUM_SAMPLES,
    }
    changes = {'seed': SEED, 'backend': BACKEND}
    cli.enable_compilation_cache()
    measured = []
    for found in measure_averages(
        path,
        EMA.value or [''],
        evaluation={name: flag.value for name, flag in replaced.items() if flag.present},
        changes={name: flag.value for name, flag in changes.items() if flag.present},
    ):
        measured.append(found)
        print(found.note, flush=True)
        for result in found.results:
            print(f'  {result.line()}', flush=True)
        if OUTPUT.value:
            _append(OUTPUT.value, [json.dumps(row) for row in found.rows])
    if PLOT.value:
        plot(measured, Path(PLOT.value).expanduser())


def _measure(
    metrics: Sequence[str], compared: Sequence[str], network: FeatureNetwork, size: Size | None
) -> list[Result]:
    """Computes `metrics`; `compared` are those that need the reference."""
    assert SAMPLES.value is not None
    check_metrics(metrics, network)
    options = {'batch_size': BATCH_SIZE.value, 'seed': SEED.value}
    with contextlib.ExitStack() as stack:
        # Open both sides before computing features, so that a wrong path fails at once.
        reference_side, found = None, None
        if compared and REFERENCE.value:
            opened = open_side(
                REFERENCE.value, compared, network, '--reference', grid_size=size, **options
            )
            reference_side, found = stack.enter_context(opened)
        opened = open_side(
            SAMPLES.value,
            metrics,
            network,
            '--samples',
            grid_size=size or found,
            count=NUM_SAMPLES.value,
            **options,
        )
        samples_side, _ = stack.enter_context(opened)
        reference = reference_side() if reference_side else None
        samples = samples_side()
    if WRITE_STATISTICS.value and reference is not None and reference.statistics is not None:
        save_statistics(WRITE_STATISTICS.value, reference.statistics, reference.spatial)
    return compute(
        metrics,
        network,
        samples,
        reference,
        seed=SEED.value,
        kid_subsets=KID_SUBSETS.value,
        kid_subset_size=KID_SUBSET_SIZE.value,
    )


def _image_size() -> Size | None:
    given = MODEL.stated['image_size'].value
    if given is None:
        return None
    size = model_flags.parse_size('image_size', given)
    return size[0], size[-1]


def _check_writable(flag: str, target: Path) -> None:
    if target.is_dir():
        raise UserError(f'--{flag}: {target}: cannot be written: it is a folder; name a file')
    check_writable(target, f'--{flag}')


def _append(path: str, lines: Sequence[str]) -> None:
    target = Path(path).expanduser()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open('a') as file:
            file.writelines(f'{line}\n' for line in lines)
    except OSError as error:
        raise UserError(
            f'--output: {target}: cannot be written: {error.strerror or error}; '
            'check the folder and the free space'
        ) from None


if __name__ == '__main__':
    cli.run(main)
