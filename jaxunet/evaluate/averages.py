"""Draws samples with several averages of a run's weights and measures them, for --checkpoint."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from jaxunet.config import split_backend
from jaxunet.evaluate.average_sweep import check_plot, measure_averages, plot
from jaxunet.evaluate.flags import (
    BACKEND,
    BATCH_SIZE,
    EMA,
    FEATURES,
    METRIC_NAMES,
    NUM_SAMPLES,
    OUTPUT,
    REFERENCE,
    SEED,
)
from jaxunet.evaluate.output import append, check_outputs
from jaxunet.metrics.evaluation import check_metrics
from jaxunet.runtime import compiled_cache
from jaxunet.runtime.paths import of_user

PLOT = flags.DEFINE_string(
    'plot', None, 'With --checkpoint: draw the metrics over the widths of --ema to this .png.'
)
of_user(PLOT)
ONLY = ('ema', 'plot', 'backend')  # flags that --samples does not have


def evaluate(checkpoint: str) -> None:
    """Measures the averages of --ema, prints and appends their results, and draws --plot.

    Raises:
      UserError: a wrong flag, path, image or checkpoint.
    """
    if METRIC_NAMES.present:
        check_metrics(METRIC_NAMES.value)
    check_outputs([OUTPUT, PLOT])
    if PLOT.value:
        check_plot(PLOT.value, EMA.value or [])
    if BACKEND.value is not None:
        split_backend(BACKEND.value, '--backend')
    evaluation = {
        'metrics': METRIC_NAMES,
        'features': FEATURES,
        'reference': REFERENCE,
        'samples': NUM_SAMPLES,
        'batch_size': BATCH_SIZE,
    }
    changes = {'seed': SEED, 'backend': BACKEND}
    compiled_cache.enable_compilation_cache()
    measured = []
    for average in measure_averages(
        checkpoint,
        EMA.value or [''],
        evaluation={name: flag.value for name, flag in evaluation.items() if flag.present},
        changes={name: flag.value for name, flag in changes.items() if flag.present},
    ):
        measured.append(average)
        print(average.note, flush=True)
        for result in average.results:
            print(f'  {result.line()}', flush=True)
        append(average.rows)
    if PLOT.value:
        plot(measured, Path(PLOT.value))
