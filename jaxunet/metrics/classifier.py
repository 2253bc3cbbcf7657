"""A small residual classifier whose features compare images in place of Inception's.

It follows David Page's ResNet-9 ("How to train your ResNet", 2018): a 3×3 convolution, then stages
of one convolution and a 2×2 max pool; every other stage adds a residual branch of two convolutions.
Batch normalization and ReLU follow each convolution. A linear layer without bias turns the spatial
maxima of the last stage into class scores.

The features are the spatial means of *every* stage: a classifier's last features cluster around its
classes and carry little texture. Each stage's features are divided by the root of their mean
variance over the training images, so that all stages have equal weight.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import check_fields, parse_json

SMALLEST = 4  # smallest shorter side of the last stage, in pixels
MAX_STAGES = 4
MAX_WIDTH = 8  # most channels of a stage, as a multiple of the first convolution's
EPSILON = 1e-5  # added to batch normalization's variance
LOGIT_SCALE = 0.125  # factor of the class scores
# Types of the parameters in a file. float16 kernels lose nothing, because training rounds them to
# float16 before it measures anything with them.
DTYPES = {'kernel': np.float16, 'scale': np.float32, 'bias': np.float32}
ARCHITECTURE, TRAINING = 'architecture', 'training'  # entries of the file, as JSON
LARGEST = 2**14  # most pixels of a side, and most classes, in a file
DAMAGED = 'the file is damaged: train the features again'

Parameters = dict[str, dict[str, Array]]
# Mean and variance of the maps before each batch normalization.
Statistics = dict[str, tuple[Array, Array]]
Maps = Float[Array, 'images height width channels']


@dataclass(frozen=True)
class Architecture:
    """The fields that determine the shapes of the parameters, and the normalisation.

    Fields:
      height, width: size of the images in pixels, 4 or more.
      channels: channels of the first convolution; the stages have 2, 4, 8, 8 times as many.
      classes: number of classes.
      mean, deviation: mean and standard deviation of each colour, pixels scaled to 0 to 1.
    """

    height: int
    width: int
    channels: int
    classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @property
    def stages(self) -> list[int]:
        """Channels of each stage."""
        count = max(1, min(MAX_STAGES, int(math.log2(min(self.height, self.width) / SMALLEST))))
        return [self.channels * min(2 ** (i + 1), MAX_WIDTH) for i in range(count)]

    @property
    def convolutions(self) -> dict[str, tuple[int, int]]:
        """Input and output channels of each convolution by name."""
        by_layer, before = {'first': (3, self.channels)}, self.channels
        for i, channels in enumerate(self.stages):
            by_layer[f'stage{i}'] = before, channels
            if has_branch(i, len(self.stages)):
                by_layer |= {f'stage{i}.{j}': (channels, channels) for j in (0, 1)}
            before = channels
        return by_layer

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all arrays of a file by name, except the two JSON texts."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (inputs, outputs) in self.convolutions.items():
            shapes[f'{name}.kernel'] = 3, 3, inputs, outputs
            shapes |= {
                f'{name}.{part}': (outputs,) for part in ('scale', 'bias', 'mean', 'variance')
            }
        return shapes | {
            'last.kernel': (self.stages[-1], self.classes),
            'feature_scale': (sum(self.stages),),
        }


def has_branch(stage: int, stages: int) -> bool:
    """Returns True for the first and third stage, and for the last of four."""
    return stage % 2 == 0 or stage == stages - 1 > 2


def init(architecture: Architecture, key: Array) -> tuple[Parameters, Statistics]:
    """Returns new float32 parameters (PyTorch's uniform distribution) and statistics."""
    params: Parameters = {}
    for name, (inputs, outputs) in architecture.convolutions.items():
        key, own = jax.random.split(key)
        bound = 1 / math.sqrt(9 * inputs)
        kernel = jax.random.uniform(own, (3, 3, inputs, outputs), jnp.float32, -bound, bound)
        params[name] = {
            'kernel': kernel,
            'scale': jnp.ones(outputs, jnp.float32),
            'bias': jnp.zeros(outputs, jnp.float32),
        }
    inputs = architecture.stages[-1]
    bound = 1 / math.sqrt(inputs)
    params['last'] = {
        'kernel': jax.random.uniform(
            key, (inputs, architecture.classes), jnp.float32, -bound, bound
        )
    }
    statistics = {
        name: (jnp.zeros(outputs, jnp.float32), jnp.ones(outputs, jnp.float32))
        for name, (_, outputs) in architecture.convolutions.items()
    }
    return params, statistics


def rounded(params: Parameters) -> Parameters:
    """Rounds parameters to the precision of a file (`DTYPES`); the result is float32."""
    return {
        name: {part: x.astype(DTYPES[part]).astype(jnp.float32) for part, x in parts.items()}
        for name, parts in params.items()
    }


def normalise(architecture: Architecture, images: UInt8[Array, 'images height width 3']) -> Maps:
    """Normalises pixels to mean 0 and standard deviation 1 per colour, float32."""
    mean, deviation = (
        jnp.asarray(x, jnp.float32)[None, None, None]
        for x in (architecture.mean, architecture.deviation)
    )
    return (images.astype(jnp.float32) / 255 - mean) / deviation


class Outputs(NamedTuple):
    """The outputs of the classifier for a batch, all float32.

    Fields:
      scores: class scores.
      features: features before scaling.
      statistics: the statistics that the batch normalization used.
    """

    scores: Float[Array, 'images classes']
    features: Float[Array, 'images d']
    statistics: Statistics


def apply(
    architecture: Architecture,
    params: Parameters,
    x: Maps,
    statistics: Statistics | None,
    *,
    dtype: DTypeLike = jnp.float32,
    precision: lax.Precision | None = None,
) -> Outputs:
    """Runs the classifier.

    Args:
      x: images from `normalise`.
      statistics: for the batch normalization; None = compute them from this batch.
      dtype: type of products and activations; statistics are float32.
    """
    used: Statistics = {}

    def layer(name: str, x: Array) -> Array:
        p = params[name]
        numbers = ('NHWC', 'HWIO', 'NHWC')
        y = lax.conv_general_dilated(
            x,
            p['kernel'].astype(dtype),
            (1, 1),
            'SAME',
            dimension_numbers=numbers,
            precision=precision,
        )
        y = y.astype(jnp.float32)
        mean, variance = (
            statistics[name]
            if statistics is not None
            else (jnp.mean(y, (0, 1, 2)), jnp.var(y, (0, 1, 2)))
        )
        used[name] = mean, variance
        factor = p['scale'] * lax.rsqrt(variance + EPSILON)
        return jax.nn.relu(
            y * factor[None, None, None] + (p['bias'] - mean * factor)[None, None, None]
        ).astype(dtype)

    x = layer('first', x.astype(dtype))
    means = []
    for i in range(len(architecture.stages)):
        x = _pool(layer(f'stage{i}', x))
        if has_branch(i, len(architecture.stages)):
            x = x + layer(f'stage{i}.1', layer(f'stage{i}.0', x))
        means.append(jnp.mean(x.astype(jnp.float32), (1, 2)))
    scores = LOGIT_SCALE * jnp.matmul(
        jnp.max(x.astype(jnp.float32), (1, 2)),
        params['last']['kernel'],
        precision=lax.Precision.HIGHEST,
    )
    return Outputs(scores, jnp.concatenate(means, axis=1), used)


def _pool(x: Array) -> Array:
    return lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), 'VALID')


def to_arrays(
    architecture: Architecture,
    params: Parameters,
    statistics: Statistics,
    feature_scale: np.ndarray,
    training: Mapping[str, object],
) -> dict[str, np.ndarray]:
    """Returns the arrays of a file; `from_arrays` is the inverse.

    Args:
      feature_scale: factors of the features, (d,).
      training: how the classifier was trained, stored as JSON.
    """
    arrays = {
        f'{name}.{part}': np.asarray(value, DTYPES[part])
        for name, parts in params.items()
        for part, value in parts.items()
    }
    for name, (mean, variance) in statistics.items():
        arrays |= {f'{name}.mean': np.asarray(mean), f'{name}.variance': np.asarray(variance)}
    texts = {
        ARCHITECTURE: np.array(json.dumps(asdict(architecture))),
        TRAINING: np.array(json.dumps(dict(training))),
    }
    return texts | arrays | {'feature_scale': feature_scale.astype(np.float32)}


class Saved(NamedTuple):
    """The contents of a file; `to_arrays` describes the fields."""

    architecture: Architecture
    params: Parameters
    statistics: Statistics
    feature_scale: Float[Array, ' d']
    training: dict[str, Any]


def from_arrays(name: str, arrays: Mapping[str, np.ndarray]) -> Saved:
    """Reads the arrays of a file.

    Args:
      name: name of the file; error messages begin with it.

    Raises:
      UserError: an entry is missing, has another shape or type, or is not finite.
    """
    architecture, training = _architecture(name, arrays), _json(name, arrays, TRAINING)
    params: Parameters = {'last': {}}
    for key, shape in architecture.shapes.items():
        if key not in arrays:
            raise UserError(f'{name}: expected an array {key}, found none; {DAMAGED}')
        kind = DTYPES.get(key.rsplit('.', maxsplit=1)[-1], np.float32)
        if (
            arrays[key].shape != shape
            or arrays[key].dtype != kind
            or not np.isfinite(arrays[key]).all()
        ):
            raise UserError(
                f'{name}: {key}: expected finite {kind.__name__} of shape {shape}, '
                f'found {arrays[key].dtype} of {arrays[key].shape}'
            )
    for layer in architecture.convolutions:
        params[layer] = {
            part: jnp.asarray(arrays[f'{layer}.{part}'], jnp.float32) for part in DTYPES
        }
    params['last'] = {'kernel': jnp.asarray(arrays['last.kernel'], jnp.float32)}
    statistics = {
        layer: (jnp.asarray(arrays[f'{layer}.mean']), jnp.asarray(arrays[f'{layer}.variance']))
        for layer in architecture.convolutions
    }
    scale = jnp.asarray(arrays['feature_scale'])
    return Saved(architecture, params, statistics, scale, training)


def _json(name: str, arrays: Mapping[str, np.ndarray], entry: str) -> dict[str, Any]:
    if entry not in arrays or arrays[entry].dtype.kind != 'U' or arrays[entry].shape != ():
        raise UserError(f'{name}: {entry}: expected a JSON object, found none; {DAMAGED}')
    return parse_json(str(arrays[entry]), f'{name}: {entry}', advice=DAMAGED)


def _architecture(name: str, arrays: Mapping[str, np.ndarray]) -> Architecture:
    values, source = _json(name, arrays, ARCHITECTURE), f'{name}: {ARCHITECTURE}'
    whole = ('height', 'width', 'channels', 'classes')
    kinds = dict.fromkeys(whole, int) | dict.fromkeys(('mean', 'deviation'), list)
    check_fields(values, kinds, source, advice=DAMAGED)
    if len(values) > len(kinds) or not all(1 <= values[k] <= LARGEST for k in whole):
        raise UserError(
            f'{source}: expected {", ".join(whole)} from 1 to {LARGEST}, and mean and deviation, '
            f'found other fields or values; {DAMAGED}'
        )
    for field in ('mean', 'deviation'):
        if len(values[field]) != 3 or any(
            type(v) not in (int, float) or (field == 'deviation' and v <= 0) for v in values[field]
        ):
            raise UserError(
                f'{source}: {field}: expected three numbers, those of deviation above 0; {DAMAGED}'
            )
    mean, deviation = (tuple(map(float, values[k])) for k in ('mean', 'deviation'))
    height, width, channels, classes = (values[k] for k in whole)
    return Architecture(height, width, channels, classes, mean, deviation)
