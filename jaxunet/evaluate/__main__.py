"""Compares samples with real images.

    python -m jaxunet.evaluate --samples samples/ --reference cifar10: --metrics fid,kid,recall

Each side is anything that `data.path` accepts, with all its images of one size; the samples may
also be a .png grid of `jaxunet.sample`. For `fid`, either side may be an .npz of statistics
(mu, sigma) in pytorch-fid's format, or one of ADM's reference batches, whose statistics serve `fid`
and `sfid` and whose images serve the others. Every result states how it was computed.

    python -m jaxunet.evaluate --samples samples/ --reference photos.zip --nearest pairs.png

This command reports which samples repeat a training image, and shows the closest pairs.

    python -m jaxunet.evaluate --checkpoint runs/photos --ema 0.03,0.05,0.10,0.15 --plot widths.png

This command draws the samples itself, with each of these averages of the weights, as the section
`evaluation` of the run's config says.

    python -m jaxunet.evaluate --checkpoint runs/cifar10 --metrics nll \\
        --reference cifar10_test:

This command bounds the likelihood of images under a model, in bits per dimension. The model may
also be a weight file; --preset or the flags of jaxunet.sample state what such a file leaves open.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

from collections.abc import Sequence

from absl import flags

from jaxunet.checkpoint import model_flags
from jaxunet.evaluate import averages, likelihood, nearest, samples
from jaxunet.evaluate import flags as shared
from jaxunet.evaluate.flags import CHECKPOINT, METRIC_NAMES, NLL, SAMPLES
from jaxunet.runtime import command
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.out_of_memory import memory_for

for module in (shared, samples, nearest, averages, likelihood, model_flags):
    flags.adopt_module_key_flags(module)  # so that --help lists them


@memory_for('this evaluation', 'lower --batch_size')
def main(argv: Sequence[str]) -> None:
    """Finds the job that the flags ask for, and does it.

    Raises:
      UserError: a flag, path or image is wrong.
    """
    check_sources()
    if SAMPLES.value:
        samples.evaluate(SAMPLES.value)
        return
    assert CHECKPOINT.value is not None
    job = likelihood if METRIC_NAMES.value == [NLL] else averages
    job.evaluate(CHECKPOINT.value)


def check_sources() -> None:
    """Checks that --samples or --checkpoint is given, without flags that only the other one uses.

    Raises:
      UserError: a flag is missing, or one does not belong.
    """
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
    for name in averages.ONLY if SAMPLES.value else samples.ONLY:
        if flags.FLAGS[name].present and not (nll and name == 'image_size'):
            raise UserError(f'--{name}: only --{other} has it; leave it out with --{given}')
    for name in likelihood.WITHOUT if nll else likelihood.ONLY:
        if flags.FLAGS[name].present:
            kind = 'not with' if nll else 'only with'
            raise UserError(f'--{name}: {kind} --metrics {NLL}; leave it out')


if __name__ == '__main__':
    command.run(main)
