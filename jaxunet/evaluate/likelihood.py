"""Bounds the likelihood of images under a model, for --metrics nll."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from jaxunet.config import split_backend
from jaxunet.evaluate.bound import LikelihoodOptions, measure_likelihood, save_terms
from jaxunet.evaluate.flags import (
    BACKEND,
    BATCH_SIZE,
    EMA,
    MODEL,
    NUM_SAMPLES,
    OUTPUT,
    REFERENCE,
    SEED,
)
from jaxunet.evaluate.output import append, check_outputs
from jaxunet.runtime import compiled_cache
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import of_user
from jaxunet.sampling.options import VARIANCES

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
of_user(TERMS)
# Flags that only nll uses (`ONLY`), and flags of other metrics that nll does not use.
ONLY = (
    'variance',
    'respacing',
    'clip',
    'terms',
    'config',
    'preset',
    'new_attention_order',
    *sorted({*MODEL.stated} - {'image_size'}),
)
WITHOUT = ('features', 'plot')


def evaluate(model: str) -> None:
    """Bounds the likelihood of --reference, prints the results, and writes --output and --terms.

    Args:
      model: path of a run, a checkpoint or a weight file.

    Raises:
      UserError: a wrong flag, path, image or model.
    """
    averages = EMA.value or ['']
    check_outputs([OUTPUT, TERMS])
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
    compiled_cache.enable_compilation_cache()
    for measured in measure_likelihood(model, averages, options, **MODEL.given()):
        print(measured.result.line(), flush=True)
        append([measured.result.row()])
        if TERMS.value:
            save_terms(Path(TERMS.value), measured)
