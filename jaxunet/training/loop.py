"""The training loop: restores, compiles, steps, logs, samples, saves, and stops when asked.

The device is never left waiting for Python: up to `IN_FLIGHT` steps are queued, and metrics are read when their step has long run.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import gc
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from tqdm import tqdm

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.state import (
    TrainState,
    fresh_state,
    make_optimizer,
    start_loss_scale,
    start_methods,
)
from jaxunet.config import Config
from jaxunet.data import pipeline
from jaxunet.data.classes import keep_classes
from jaxunet.data.images import grid, save_png
from jaxunet.data.sources import Source
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.backends import describe, load_ops
from jaxunet.runtime.distributed import agree
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.progress import progress_bar
from jaxunet.sampling.generator import Generator
from jaxunet.sampling.sampler import SamplerConfig
from jaxunet.training.background import Background
from jaxunet.training.calls import check_start, steps_of_call
from jaxunet.training.clock import Clock, Milestones
from jaxunet.training.evaluation import Evaluator, evaluation_table
from jaxunet.training.logs import Logs
from jaxunet.training.parallel import STOP, Data, Parallel
from jaxunet.training.preemption import Preemption
from jaxunet.training.step import make_train_step

IN_FLIGHT = 8


def train(
    config: Config,
    workdir: pathlib.Path,
    source: Source,
    initial: TrainState | None = None,
    milestones: Milestones | None = None,
) -> int:
    """Trains until `train.steps`, or until SIGTERM or SIGINT; returns the step reached, which is saved.

    Args:
      source: the images (`jaxunet.data.sources.open_source`).
      initial: numpy state to start from if the workdir has no checkpoint (from `initial_state`); None = fresh parameters.
      milestones: times that end the run instead, which then is not saved; one process only.

    Raises:
      UserError: the workdir holds another run, the data does not fit the config, too many non-finite steps in a row, or the last
        checkpoint could not be written.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f'--workdir: {workdir}: cannot be made: {error.strerror or error}; choose another'
        ) from None
    with _alone(workdir), Preemption() as preemption:
        return _Run(config, workdir, source, initial, preemption, milestones).run()


@contextlib.contextmanager
def _alone(workdir: pathlib.Path) -> Iterator[None]:
    """Process 0 holds a lock on the workdir, which ends with the process. Raises UserError: another run holds it."""
    if jax.process_index() != 0:
        yield
        return
    with (workdir / '.lock').open('w') as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(
                f'--workdir: another run is training in {workdir}; wait for its end, or choose another folder'
            ) from None
        except OSError as error:  # a file system without locks
            logging.warning(
                '--workdir: %s cannot be locked (%s): nothing keeps a second run out of it',
                workdir,
                error.strerror or error,
            )
        yield


class _Run:
    """One call of `train`."""

    def __init__(
        self,
        config: Config,
        workdir: pathlib.Path,
        source: Source,
        initial: TrainState | None,
        preemption: Preemption,
        milestones: Milestones | None,
    ) -> None:
        self.config, self.workdir, self.source, self.preemption, self.milestones = (
            config,
            workdir,
            source,
            preemption,
            milestones,
        )
        if milestones and jax.process_count() > 1:
            raise ValueError(
                'milestones: the processes of a run would reach them at different steps'
            )
        self.main = jax.process_index() == 0
        self.parallel = Parallel(config)
        if config.train.evaluate_every and self.main:
            self.evaluator = Evaluator(config, source, self.parallel.local_devices)
        self.checkpoints = checkpoint.Checkpoints(workdir, keep=config.train.keep)
        logging.info('%s', describe(config.backend, config.precision))
        self.model = build_unet(config, load_ops(config.backend, config.precision))
        self.optimizer = make_optimizer(config)
        self.seconds = 0.0  # of training alone
        self.class_names = source.class_names if config.model.num_classes else ()
        self.state, self.step = self._restore(initial)
        agree({'the step to go on from': self.step})
        self.start = self.step
        check_start(config, self.start)
        self.stop = False
        self.failed_save = ''

    def _restore(self, initial: TrainState | None) -> tuple[TrainState, int]:
        restored = self.checkpoints.restore()
        if restored is not None:
            changes = checkpoint.check_resumable(restored.config, self.config, self.workdir)
            self.class_names = keep_classes(
                restored.class_names, self.class_names, self.config, self.workdir
            )
            step = int(restored.state.step)
            logging.info(
                'resuming %s at step %d%s',
                self.workdir,
                step,
                '; changed: ' + ', '.join(changes) if changes else '',
            )
            self.seconds = restored.seconds
            state = restored.state
            if restored.config.precision != self.config.precision:
                state = dataclasses.replace(
                    state, loss_scale=jax.device_get(start_loss_scale(self.config))
                )
            weighting, timesteps = jax.device_get(jax.jit(lambda: start_methods(self.config))())
            if restored.config.loss != self.config.loss:  # another method starts anew
                state = dataclasses.replace(state, weighting=weighting)
            if restored.config.timesteps != self.config.timesteps:
                state = dataclasses.replace(state, timesteps=timesteps)
            return self.parallel.replicate(state), step
        if initial is not None:
            return self.parallel.replicate(initial), 0
        return self.parallel.replicate(fresh_state(self.config)), 0

    def run(self) -> int:
        total = self.config.train.steps
        if self.step >= total:
            print(
                f'{self.workdir} has already trained {self.step} steps. To go on, raise --config.train.steps (now {total}); to start anew, '
                'choose another --workdir.'
            )
            return self.step
        data, batches = self._open_data()
        platform = self.parallel.devices[0].platform
        self.at_once = steps_of_call(
            self.config, resident=batches is None, platform=platform, start=self.start
        )
        agree({'the steps of a call': self.at_once})
        if self.at_once > 1 and platform == 'cpu':
            logging.warning(
                'train.steps_per_call: XLA runs a loop of %d steps slowly on a CPU; 1 is quicker there',
                self.at_once,
            )
        logs = Logs(self.workdir, self.start) if self.main else None
        if self.config.train.evaluate_every and self.main:
            self.evaluations = evaluation_table(self.workdir, self.start)
        bar = progress_bar(total=total, initial=self.start, unit='step', disable=not self.main)
        try:
            bar.set_description('compiling')
            began = time.perf_counter()
            diffusion = make_diffusion(self.config.diffusion)
            compiled = self.parallel.compile(
                lambda axis: make_train_step(
                    self.config, self.model, diffusion, self.optimizer, axis_name=axis
                ),
                self.state,
                self._with_stop(data),
                steps=self.at_once,
                keep=True,
            )
            bar.write(
                f'compiled the step in {time.perf_counter() - began:.1f} s; {len(self.parallel.devices)} x '
                f'{self.parallel.devices[0].device_kind}, {self.config.parallel.mode}'
            )
            self.sampler = (
                Background(self._compile_sampler)
                if self.config.train.sample_every and self.main
                else None
            )
            bar.set_description('training')
            gc.freeze()  # what is here now stays: going through it again would stall the loop for a tenth of a second
            self._loop(compiled, data, batches, logs, bar)
        finally:
            with contextlib.suppress(Exception):  # what failed is on its way already
                jax.block_until_ready(
                    self.state
                )  # a step that runs while the process ends would crash it
            bar.close()
            if batches is not None:
                batches.close()
            if logs is not None:
                logs.close()
            self.checkpoints.close()
        if self.failed_save:
            raise checkpoint.CheckpointWriteError(self.failed_save)
        return self.step

    def _open_data(self) -> tuple[Data, Any]:
        """What the step is given: the resident dataset and None, or the first batch and the stream of the others."""
        c = self.config
        if pipeline.choose_cache(c, self.source) == 'device':
            images, labels = pipeline.load_all(self.source, progress=self.main)
            return self.parallel.replicate({'images': images, 'labels': labels}), None
        share = c.data.batch_size // jax.process_count()
        shapes = {
            'image': np.zeros((share, *c.image_shape), np.uint8),
            'label': np.zeros(share, np.int32),
        }
        return self.parallel.put_batch(shapes), pipeline.stream(
            self.source, c, self.start, self.parallel.local_rows
        )

    def _loop(
        self,
        compiled: Any,
        data: Data,
        batches: Iterator[dict[str, np.ndarray]] | None,
        logs: Logs | None,
        bar: tqdm,
    ) -> None:
        t = self.config.train
        queue: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()
        clock = Clock(self.start, self.seconds)
        ahead = list(self.milestones.seconds) if self.milestones else []

        def take(count: int) -> None:
            """Waits for the oldest queued calls until `count` are left, and tells what their steps gave."""
            while len(queue) > count:
                step, metrics = queue.popleft()
                # Each process looks at the metrics of a step after the same number of steps more, so all stop at the same one.
                self.stop |= bool(np.any(metrics.get(STOP, 0)))
                bad = np.atleast_1d(metrics['bad_steps'])  # waits for the steps
                bar.update(self.at_once)
                if bad.max() >= t.max_bad_steps:
                    raise UserError(
                        f'training stopped at step {step}: {bad.max()} steps in a row had a loss or gradient that is not finite '
                        f'(train.max_bad_steps={t.max_bad_steps}); lower optimizer.learning_rate, set optimizer.clip_norm, or use '
                        f'precision=bfloat16. The last checkpoint is step {self.checkpoints.latest()}.'
                    )
                if step % t.log_every == 0 or step == t.steps:
                    elapsed, steps = clock.lap(step)
                    self.seconds = clock.seconds
                    self._log(
                        logs,
                        bar,
                        step,
                        jax.tree.map(lambda x: np.atleast_1d(x)[-1], metrics),
                        elapsed / steps,
                    )

        while self.step < t.steps and not self._asked_to_stop():
            if batches is not None:
                with self._kept(take, bar):
                    batch = next(batches)
                data = self.parallel.put_batch(batch)
            self.state, metrics = compiled(self.state, self._with_stop(data))
            self.step += self.at_once
            queue.append((self.step, self.parallel.local(metrics)))
            take(max(IN_FLIGHT // self.at_once, 1))
            self.preemption.nothing_to_save = False
            sample = t.sample_every and (self.step % t.sample_every == 0 or self.step == t.steps)
            save = self.step % t.checkpoint_every == 0 or self.step == t.steps
            evaluate = t.evaluate_every and (
                self.step % t.evaluate_every == 0 or self.step == t.steps
            )
            reached = bool(ahead) and clock.seconds >= ahead[0]
            if sample or save or evaluate or reached:
                take(0)
                clock.pause()
                self.seconds = clock.seconds
                if save and not self.milestones:
                    self._save(bar)
                with self._kept(take, bar):
                    if sample and logs is not None:
                        self._sample(logs, bar)
                    if evaluate and logs is not None:
                        self._evaluate(logs, bar)
                if reached and self.milestones:
                    ahead.pop(0)
                    self.milestones.reached(self.step, self.seconds, self._averaged())
                    if not ahead:
                        return
                clock.go_on()
        take(0)
        self.seconds = clock.seconds
        if self.step < t.steps:
            if self.checkpoints.latest() != self.step:
                self._save(bar)
            bar.write(f'stopped at step {self.step}; the same command goes on from there')
        self._finish_saving()

    @contextlib.contextmanager
    def _kept(self, take: Callable[[int], None], bar: tqdm) -> Iterator[None]:
        """An error in here, such as a corrupt image's, takes no trained step with it: all are saved. Not of several processes' runs,
        of which the others know nothing of it."""
        try:
            yield
        except UserError:
            take(0)
            if (
                jax.process_count() == 1
                and not self.milestones
                and self.checkpoints.latest() != self.step
            ):
                self._save(bar)
                self._finish_saving()
            raise

    def _asked_to_stop(self) -> bool:
        return self.preemption.requested if jax.process_count() == 1 else self.stop

    def _with_stop(self, data: Data) -> Data:
        """In a run of several processes a step also tells each whether another was asked to stop."""
        return (
            data
            if jax.process_count() == 1
            else self.parallel.with_stop(data, self.preemption.requested)
        )

    def _log(
        self,
        logs: Logs | None,
        bar: tqdm,
        step: int,
        metrics: dict[str, Any],
        seconds_per_step: float,
    ) -> None:
        if logs is None:
            return
        rate = self.config.data.batch_size / seconds_per_step
        logs.row(
            {
                'step': step,
                'loss': float(metrics['loss']),
                'learning_rate': float(metrics['learning_rate']),
                'grad_norm': float(metrics['grad_norm']),
                'images_per_second': rate,
                'step_ms': seconds_per_step * 1e3,
                'loss_scale': float(metrics['loss_scale']),
                'skipped_steps': int(metrics['skipped']),
                'training_seconds': self.seconds,
            }
        )
        bar.set_postfix_str(
            f'loss={float(metrics["loss"]):.4f}, {rate:.0f} images/s, {seconds_per_step * 1e3:.1f} ms/step',
            refresh=False,
        )

    def _save(self, bar: tqdm) -> None:
        """Process 0 writes. A failed write is told, and the next checkpoint tries again; only a last one that fails ends in an error."""
        if not self.main:
            return
        self.failed_save = ''
        try:
            warning = self.checkpoints.save(
                self.step,
                self.parallel.fetch(self.state),
                self.config,
                self.seconds,
                self.class_names,
            )
        except checkpoint.CheckpointWriteError as error:
            warning = self.failed_save = str(error)
        if warning:
            bar.write(f'warning: {warning}')

    def _finish_saving(self) -> None:
        try:
            self.checkpoints.wait()
        except checkpoint.CheckpointWriteError as error:
            self.failed_save = str(error)

    def _compile_sampler(self) -> Generator:
        """In a thread, beside the first steps."""
        t = self.config.train
        sampler = SamplerConfig(name='ddim', steps=t.sample_steps)
        # On one device: pmap's replicas need no second layout, and a grid is small.
        generator = Generator(
            self.config, sampler, batch_size=t.sample_count, devices=self.parallel.local_devices[:1]
        )
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=generator._replicated),
            checkpoint.state_template(self.config).params,
        )
        generator.compile(shapes)
        return generator

    def _sample(self, logs: Logs, bar: tqdm) -> None:
        assert self.sampler is not None
        generator = self.sampler.result(lambda: not self.preemption.requested)
        if generator is None:
            return  # asked to stop: saving comes first
        count, classes = self.config.train.sample_count, self.config.model.num_classes
        indices = np.arange(count)
        labels = (indices % classes).astype(np.int32) if classes else None
        params = generator.put(self._averaged())

        def progress(_: float) -> bool:
            return not self.preemption.requested

        images = generator(
            params, seed=self.config.seed, indices=indices, labels=labels, progress=progress
        )
        if images is None:
            return
        picture = grid(images, classes if 1 < classes <= 20 else None)
        path = self.workdir / 'samples' / f'step_{self.step:07d}.png'
        save_png(path, picture)
        logs.image(self.step, picture)
        bar.write(f'step {self.step}: samples in {path}')

    def _averaged(self) -> Params:
        """The average of the weights that sampling uses, on the first device of this process."""
        return self.parallel.local(next(iter(self.state.ema.values())))

    def _evaluate(self, logs: Logs, bar: tqdm) -> None:
        """By process 0, on all its devices."""
        results = self.evaluator.measure(self._averaged(), lambda: not self.preemption.requested)
        if results is None:
            return  # asked to stop
        rows = [self.evaluator.row(result, self.step, self.seconds) for result in results]
        self.evaluations.add(rows)
        for result in results:
            logs.scalar(f'evaluation/{result.label}', result.value, self.step)
        told = ', '.join(f'{r.label} {r.value:.5g}' for r in results)
        row = next((row for row in rows if row['reference']), rows[0])
        how = f'{row["num_samples"]} samples by {row["sampler"]}, {row["evaluations"]} evaluations each'
        how += f', against {row["reference"]}' if row['reference'] else ''
        bar.write(
            f'step {self.step}, {self.seconds:.1f} s of training: {told} ({how}; {self.evaluations.path} has the rest)'
        )
