"""A compiled training step for tests that look at its losses and its state."""

import functools

from jaxunet.checkpoint.optimizer import make_optimizer
from jaxunet.checkpoint.state import fresh_state
from jaxunet.data import pipeline
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.unet import build_unet
from jaxunet.ops.backends import choose
from jaxunet.training.parallel import Parallel
from jaxunet.training.step import make_train_step


class Bench:
    """A compiled step with its state and the resident digits.

    Args:
      shared: compile as in a run, so that `support.shared_steps` may return the step of another
        run. Do not use it in a test that replaces parts of a step.
    """

    def __init__(self, config, source, *, shared=True):
        kernels = choose(config.backend, config.precision, here=False)
        self.config, self.parallel, self.shared = config, Parallel(config, kernels), shared
        self.optimizer, model = (
            make_optimizer(config),
            build_unet(config, kernels.ops),
        )
        self.restart()
        images, labels = pipeline.load_all(source, progress=False)
        self.resident = self.parallel.replicate({'images': images, 'labels': labels})
        self.make = lambda axis: make_train_step(
            config, model, make_diffusion(config.diffusion), self.optimizer, kernels, axis_name=axis
        )

    def restart(self):
        """Sets the state to that of a new run."""
        self.state = self.parallel.replicate(fresh_state(self.config))

    @functools.cached_property
    def lowered(self):
        """The step on the resident dataset, lowered and not compiled."""
        return self.parallel.lower(self.make, self.state, self.resident)

    @functools.cached_property
    def step(self):
        """The step on the resident dataset."""
        if 'lowered' in self.__dict__:
            return self.lowered.compile(compiler_options=self.parallel.compiler_options)
        return self.parallel.compile(
            self.make, self.state, self.resident, steps=1, cache=self.shared
        )

    def losses(self, count=3, batches=None):
        if batches is None:
            step, each = self.step, [self.resident] * count
        else:
            each = [self.parallel.put_batches([batch]) for batch in batches[:count]]
            step = self.parallel.compile(self.make, self.state, each[0], steps=1, cache=self.shared)
        out = []
        for data in each:
            self.state, metrics = step(self.state, data)
            metrics = self.parallel.local(metrics)
            out += [float(metrics['step_loss']), float(metrics['grad_norm'])]
        return out
