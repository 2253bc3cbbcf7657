"""Measures several averages of a run's weights: draws samples with each and computes their metrics.

The section `evaluation` of the run's config sets how; options can replace its fields.
"""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.averages import pick_several, width_of
from jaxunet.checkpoint.load import check_exists
from jaxunet.config import resolve, to_dict
from jaxunet.config.schema import Fields
from jaxunet.data.source import with_class_order
from jaxunet.data.sources import open_images
from jaxunet.metrics.evaluation import Result
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.plots import check_plots
from jaxunet.runtime.remote import on_disk
from jaxunet.runtime.rows import Row
from jaxunet.runtime.whole_files import written
from jaxunet.training.evaluation import Evaluator


@dataclass(frozen=True)
class AverageMetrics:
    """The metrics of one average.

    Attributes:
      ema: the average as it was asked for, or the run's first rate.
      width: of a power-function average; None for rates and weights without averaging.
      note: names the weights.
      rows: one for each result, with everything that it depends on.
    """

    ema: str
    width: float | None
    note: str
    results: list[Result]
    rows: list[Row]


def measure_averages(
    path: str, averages: Sequence[str], *, evaluation: Mapping[str, object], changes: Fields
) -> Iterator[AverageMetrics]:
    """Yields the metrics of each average, as soon as they are computed.

    Args:
      path: a workdir or one checkpoint in it.
      averages: as `--ema` of `jaxunet.sample`, each once.
      evaluation: fields of `evaluation` that replace those of the run.
      changes: other fields of the config that replace those of the run, such as its backend.

    Raises:
      UserError: there is no checkpoint, the run does not have an average, or the samples cannot be
        drawn or compared.
    """
    for ema in averages:
        if averages.count(ema) > 1:
            raise UserError(f'--ema: {ema or "the default"} is given twice; give it once')
    path = on_disk(path)
    check_exists(path)
    if pathlib.Path(path).is_file():
        raise UserError(
            f'--checkpoint: {path} is a file, expected a workdir or a checkpoint in one, whose '
            'config says how to measure it; draw samples of a weight file by python -m '
            f'jaxunet.sample --checkpoint {shlex.quote(path)}, and give them to --samples'
        )
    restored = checkpoint.read(path)
    fields = to_dict(restored.config) | changes
    config = resolve(fields | {'evaluation': fields['evaluation'] | dict(evaluation)})
    weights = pick_several(restored, averages)
    needs_images = not config.evaluation.reference or config.model.low_res_size
    source = None
    if needs_images:
        source = with_class_order(open_images(config), restored.facts.class_names)
    evaluator = Evaluator(config, source, jax.local_devices())
    first_rate = str(config.ema.rates[0])
    step, seconds = int(restored.state.step), restored.facts.seconds
    for ema, (params, note) in zip(averages, weights, strict=True):
        results = evaluator.measure(params)
        width = width_of(config, ema)
        named: Row = {'checkpoint': path, 'ema': ema or first_rate, 'width': width, 'weights': note}
        rows = [named | evaluator.row(result, step, seconds) for result in results]
        yield AverageMetrics(ema or first_rate, width, note, results, rows)


def check_plot(path: str, averages: Sequence[str]) -> None:
    """Checks that `plot` can draw, before the samples are drawn.

    Raises:
      UserError: it cannot.
    """
    if not path.lower().endswith('.png'):
        raise UserError(f'--plot: expected a name that ends in .png, found {path!r}')
    if len(averages) < 2:
        raise UserError('--plot: needs several averages to compare, such as --ema=0.05,0.10,0.15')
    check_plots('leave the flag out')


def plot(measured: Sequence[AverageMetrics], path: pathlib.Path) -> None:
    """Draws each metric over the width; other averages are horizontal lines.

    Raises:
      UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    labels = [result.label for result in measured[0].results]
    figure = Figure(figsize=(1 + 5 * len(labels), 4.2), layout='constrained')
    panels = figure.subplots(1, len(labels), squeeze=False)[0]
    swept = sorted((m for m in measured if m.width is not None), key=lambda m: m.width or 0.0)
    others = [m for m in measured if m.width is None]
    for i, (panel, label) in enumerate(zip(panels, labels, strict=True)):
        panel.errorbar(
            [m.width for m in swept],
            [m.results[i].value for m in swept],
            yerr=[m.results[i].std or 0.0 for m in swept],
            marker='o',
            capsize=3,
            label='power function',
        )
        for other, style in zip(others, ('--', ':', '-.') * len(others), strict=False):
            text = 'without averaging' if other.ema == 'none' else f'rate {other.ema}'
            panel.axhline(other.results[i].value, color='grey', linestyle=style, label=text)
        panel.set_xlabel('width of the average (sigma_rel)')
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
        if others:
            panel.legend(fontsize='small')
    with written(path, '--plot') as partial:
        figure.savefig(partial, format='png', dpi=110)
