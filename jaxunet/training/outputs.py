"""Writes all results of a run except checkpoints: logs, sample grids and their metrics."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping

import numpy as np
from tqdm import tqdm

from jaxunet.checkpoint.store import state_template
from jaxunet.config.samplers import grid_sampler
from jaxunet.data.images import class_columns, grid, save_png
from jaxunet.model.unet import Params
from jaxunet.runtime.attempts import Attempts
from jaxunet.runtime.background import Background
from jaxunet.runtime.beside_steps import beside_steps
from jaxunet.runtime.out_of_memory import memory_for
from jaxunet.sampling.generator import Generator, StoppedError
from jaxunet.sampling.options import SamplerConfig
from jaxunet.training.conditions import SampleConditions, side_by_side
from jaxunet.training.evaluation import Evaluator, evaluation_table
from jaxunet.training.held_out import COLUMNS as HELD_OUT_COLUMNS
from jaxunet.training.held_out import HeldOutLoss, Losses, Turn
from jaxunet.training.log_file import FILE as LOG
from jaxunet.training.log_file import open_logs
from jaxunet.training.loggers.interface import RunStart
from jaxunet.training.loggers.logs import Logs
from jaxunet.training.logs import COLUMNS, DEVICES, OPTIONAL, ROLLBACKS, SPIKES, step_row
from jaxunet.training.page import FILE as PAGE
from jaxunet.training.page import write_page
from jaxunet.training.preemption import Caller
from jaxunet.training.restarts import FILE as RESTARTS
from jaxunet.training.resume import StartingPoint
from jaxunet.training.step import Metrics
from jaxunet.training.subject import Due, Outputs, Subject

DRAWING_MEMORY = ('drawing samples', 'lower train.sample_count')  # for `memory_for`
HELD_OUT_MEMORY = (
    'the held-out loss',
    'raise optimizer.accumulate_steps or set train.holdout_every=0',
)


def samples_path(workdir: pathlib.Path, step: int) -> pathlib.Path:
    """Returns the path of the grid of samples of a step."""
    return workdir / 'samples' / f'step_{step:07d}.png'


class UNetOutputs(Outputs):
    """The outputs of a run, all written by process 0.

    Args:
      subject: its source has held-out images if `train.holdout_every` is set; the grids of a
        super-resolution network enlarge some of its images.
      evaluator: computes the metrics of samples; None if `train.evaluate_every` is 0.
      begin: where the run starts; later rows of its log files are dropped.
      bar: the progress bar, above which messages are printed.
      caller: takes each row of metrics.csv; once it asks the run to stop, sampling ends early.
    """

    def __init__(
        self,
        subject: Subject,
        evaluator: Evaluator | None,
        begin: StartingPoint,
        bar: tqdm,
        caller: Caller,
    ) -> None:
        config, workdir, source = subject.config, subject.workdir, subject.source
        self._config, self._workdir, self._bar, self._caller = config, workdir, bar, caller
        # All of this process measure the held-out loss; the first draws the sample grids.
        self._devices = subject.session.parallel.local_devices
        self._all_devices = len(subject.session.parallel.devices)
        self._conditions = SampleConditions(config, source, config.train.sample_count)
        self._restarted = (workdir / RESTARTS).exists()
        columns = (
            *COLUMNS[1:],
            *(DEVICES if self._restarted else ()),
            *(SPIKES if config.train.spike_sigmas else ()),
            *(ROLLBACKS if config.train.rollbacks else ()),
            *(HELD_OUT_COLUMNS if config.train.holdout_every else ()),
        )
        self._rollbacks = begin.facts.rollbacks
        run = RunStart(config, workdir, begin.step, columns, OPTIONAL)
        self._logs = Logs(run, HELD_OUT_COLUMNS)
        self._evaluator = evaluator
        self._table = evaluation_table(workdir, begin.step) if evaluator else None
        self._evaluations: list[Mapping[str, object]] = [
            *(self._table.earlier if self._table else ())
        ]
        self._generator: Background[Generator] | None = None
        self._held_out: HeldOutLoss | None = None
        if config.train.holdout_every:
            teacher = begin.state().teacher if config.diffusion.folds_guidance else ()
            self._held_out = HeldOutLoss(config, source, self._devices, teacher)
        self._turn = Turn()
        for row in self._logs.earlier:
            if earlier := Losses.of_row(row):
                self._turn.add(earlier)
        self._held_out_loss: Background[HeldOutLoss] | None = None
        self._measured: dict[int, Losses] = {}  # by step, until the step is logged
        self._attempts = Attempts()
        with self._attempts.attempt(LOG):
            open_logs(workdir)

    def close(self) -> None:
        """Tries once more to write rows that a full disk refused; brings the page up to date."""
        self._logs.close(self._evaluations)
        if (self._workdir / PAGE).exists():
            with self._attempts.attempt(PAGE):
                write_page(self._config, self._workdir)
        if self._table:
            self._table.close()

    def start_compiling(self) -> None:
        """Compiles what runs between steps, beside the first training steps where that is safe."""
        if self._config.train.sample_every:
            self._generator = beside_steps(self._compile_generator, self._devices)
        if self._held_out:
            compile_loss = memory_for(*HELD_OUT_MEMORY)(self._held_out.compile)
            self._held_out_loss = beside_steps(compile_loss, self._devices)

    def log(
        self, step: int, metrics: Metrics, seconds_per_step: float, training_seconds: float
    ) -> None:
        """Writes the metrics of one step to the log files and the progress bar."""
        rate = self._config.data.batch_size / seconds_per_step
        held_out = self._measured.pop(step, None)
        row = step_row(step, metrics, seconds_per_step) | {
            'images_per_second': rate,
            'loss_scale': float(metrics['loss_scale']),
            'training_seconds': training_seconds,
            'rollbacks': self._rollbacks,
            **({'devices': self._all_devices} if self._restarted else {}),
            **({'spikes': int(metrics['spikes'])} if 'spikes' in metrics else {}),
            **(held_out.columns() if held_out else {}),
        }
        self._logs.row(row)
        self._caller.logged(row)
        if held_out and (turned := self._turn.add(held_out)):
            self._bar.write(f'step {step}: {turned}')
        self._bar.set_postfix_str(
            f'loss={row["loss"]:.4f}, {rate:.0f} images/s, {row["step_ms"]:.1f} ms/step',
            refresh=False,
        )

    @memory_for(*HELD_OUT_MEMORY)
    def measure_held_out(self, step: int, params: Params) -> None:
        """Measures the held-out loss for the log of this step; does nothing once asked to stop."""
        assert self._held_out_loss is not None
        held_out = self._held_out_loss.result(self._keep_on)
        if held_out is not None:
            self._measured[step] = held_out.measure(params)

    def show(self, step: int, due: Due, weights: Params, training_seconds: float) -> None:
        if due.samples:
            self.sample(step, weights)
        if due.metrics:
            self.evaluate(step, weights, training_seconds)

    @memory_for(*DRAWING_MEMORY)
    def sample(self, step: int, params: Params) -> None:
        """Draws a grid of samples and saves it; draws nothing more once asked to stop."""
        assert self._generator is not None
        generator = self._generator.result(self._keep_on)
        if generator is None:
            return
        count = self._config.train.sample_count
        indices = np.arange(count)
        labels, low_res, originals = self._conditions.load(indices)
        try:
            images = generator(
                generator.put(params),
                seed=self._config.seed,
                indices=indices,
                labels=labels,
                low_res=low_res,
                progress=lambda _: self._keep_on(),
            )
        except StoppedError:
            return
        columns = class_columns(self._config.model.num_classes, count)
        if low_res is not None and originals is not None:
            columns = 3 * math.ceil(math.sqrt(count / 3))
            keeps = self._config.data.background == 'keep'
            images = side_by_side(low_res, images, originals, keeps=keeps)
        picture = grid(images, columns)
        path = samples_path(self._workdir, step)
        with self._attempts.attempt('samples'):
            save_png(path, picture)
            self._bar.write(f'step {step}: samples in {path}')
        self._logs.image(step, picture)
        with self._attempts.attempt(PAGE):
            write_page(self._config, self._workdir)

    @memory_for(
        'measuring samples',
        'lower evaluation.batch_size, or set train.evaluate_every=0 and measure the checkpoints '
        'later, with python -m jaxunet.evaluate --checkpoint',
    )
    def evaluate(self, step: int, params: Params, training_seconds: float) -> None:
        """Writes the metrics of new samples; writes nothing once asked to stop."""
        assert self._evaluator is not None
        assert self._table is not None
        try:
            results = self._evaluator.measure(params, self._keep_on)
        except StoppedError:
            return
        rows = [self._evaluator.row(result, step, training_seconds) for result in results]
        self._table.add(rows)
        self._evaluations += rows
        self._logs.metrics(step, {f'evaluation/{r.label}': r.value for r in results})
        values = ', '.join(f'{r.label} {r.value:.5g}' for r in results)
        row = next((row for row in rows if row['reference']), rows[0])
        against = f', against {row["reference"]}' if row['reference'] else ''
        self._bar.write(
            f'step {step}, {training_seconds:.1f} s of training: {values} ({row["num_samples"]} '
            f'samples by {row["sampler"]}, {row["evaluations"]} evaluations each{against}; '
            f'more in {self._table.path})'
        )

    def _keep_on(self) -> bool:
        return not self._caller.requested

    @memory_for(*DRAWING_MEMORY)
    def _compile_generator(self) -> Generator:
        sampler = grid_sampler(self._config)
        # One device is enough for a grid, and spares pmap's replicas a second layout.
        generator = Generator(
            self._config,
            SamplerConfig(sampler.name, sampler.steps),
            batch_size=self._config.train.sample_count,
            devices=[self._devices[0]],
        )
        generator.compile_for(state_template(self._config).params)
        return generator
