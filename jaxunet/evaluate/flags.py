"""Flags of `jaxunet.evaluate` that several of its jobs have."""

from __future__ import annotations

from absl import flags

from jaxunet.checkpoint import model_flags
from jaxunet.config.relations import METRICS
from jaxunet.runtime.paths import of_user

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
    'batch_size',
    64,
    'Images per call of the feature network; nll: of the model. With --checkpoint: images drawn at '
    "a time; default: the run's evaluation.batch_size.",
    lower_bound=1,
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
    upper_bound=2**32 - 1,
)
OUTPUT = flags.DEFINE_string(
    'output', None, 'Append the results to this file, one JSON object per line.'
)
CHECKPOINT = flags.DEFINE_string(
    'checkpoint',
    None,
    'Instead of --samples: a workdir or a checkpoint to draw them from, as the section evaluation '
    'of its config says; --metrics, --features, --reference, --num_samples, --batch_size and '
    "--seed replace the run's fields where they are given. With --metrics nll also a weight file.",
)
EMA = flags.DEFINE_list(
    'ema',
    None,
    'With --checkpoint: the averages to evaluate, each as --ema of jaxunet.sample, such as '
    "0.03,0.05,0.10,none; default: the run's first rate.",
)
BACKEND = flags.DEFINE_string(
    'backend', None, "With --checkpoint: as config.backend; default: the run's."
)
MODEL = model_flags.define(
    'nll: config of the model in a weight file that does not state it.',
    image_size_help=" For a .png grid: size of its images; default: the reference's.",
)
of_user(SAMPLES, REFERENCE, FEATURES, OUTPUT, CHECKPOINT)
