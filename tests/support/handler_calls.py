"""Valid calls of every FFI handler with random sizes, and the same calls with a mistake."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import xla_ffi  # noqa: F401  # registers the handlers
from jaxunet.ops.adamw.packed import room

CPU = jax.local_devices(backend='cpu')[0]
Shape = tuple[tuple[int, ...], DTypeLike]
Attributes = dict[str, np.int64 | np.float32 | bool]
HANDLERS = (  # in the order of `right`
    'jaxunet_attention_forward',
    'jaxunet_attention_backward',
    'jaxunet_conv3x3',
    'jaxunet_conv3x3_shortcut_gradient',
    'jaxunet_conv3x3_upsampled',
    'jaxunet_conv3x3_weight_gradient',
    'jaxunet_conv3x3_upsampled_weight_gradient',
    'jaxunet_linear',
    'jaxunet_linear_weight_gradient',
    'jaxunet_weight_gradients',
    'jaxunet_projections',
    'jaxunet_projection_gradients',
    'jaxunet_group_norm_forward',
    'jaxunet_group_norm_statistics',
    'jaxunet_group_norm_gradient',
    'jaxunet_group_norm_dropout_forward',
    'jaxunet_group_norm_dropout_gradient',
    'jaxunet_sum_of_squares',
    'jaxunet_adamw',
    'jaxunet_narrow',
    'jaxunet_pack',
)


class Call(NamedTuple):
    """One call of a handler, wrong or right."""

    target: str
    operands: list[Shape]
    results: list[Shape]
    attributes: Attributes
    in_place: int = -1  # operand whose memory the first result reuses; further results follow it

    @property
    def has_workspace(self) -> bool:
        """True if the last result is a workspace, memory for partial results."""
        return 'weight_gradient' in self.target

    def __call__(self, device: jax.Device = CPU) -> list[jax.Array]:
        shapes = [jax.ShapeDtypeStruct(*shape) for shape in self.results]
        with jax.default_device(device):
            operands = [jax.device_put(np.zeros(*shape), device) for shape in self.operands]
            last = min(len(operands), self.in_place + len(shapes))
            same = {
                i: i - self.in_place
                for i in range(self.in_place, last)
                if self.operands[i] == self.results[i - self.in_place]
            }
            aliases = same if self.in_place >= 0 else None
            return jax.block_until_ready(
                jax.ffi.ffi_call(self.target, shapes, input_output_aliases=aliases)(
                    *operands, **self.attributes
                )
            )


def right(number: int, draw: random.Random) -> Call:  # noqa: PLR0915 (a case per handler)
    """A valid call of random sizes; consecutive numbers go through all handlers."""
    kind = draw.choice([jnp.float32, jnp.float16, jnp.bfloat16])
    batch, height, width, features = (draw.randint(1, 3) for _ in range(4))
    parts = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
    channels, image = sum(parts), (batch, height, width)
    heads, tokens, head = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 4)

    def images(sizes: list[int]) -> list[Shape]:
        return [((*image, size), kind) for size in sizes]

    def rows(count: int, size: int = 0) -> list[Shape]:
        return [((draw.choice([1, batch]), size or channels), jnp.float32) for _ in range(count)]

    def forward() -> Call:
        out = [((batch, tokens, heads * head), kind), ((batch, heads, tokens), jnp.float32)]
        return Call(
            'attention_forward',
            [((batch, tokens, 3 * heads * head), kind)],
            out,
            {'heads': np.int64(heads)},
        )

    def backward() -> Call:
        call = forward()
        operands = [*call.operands, *call.results, call.results[0]]
        return Call('attention_backward', operands, call.operands, call.attributes)

    def conv() -> Call:
        flipped, shift, activation, shortcut = (draw.random() < 0.5 for _ in range(4))
        residual = (
            [draw.randint(1, 4) for _ in range(draw.randint(1, 2))]
            if shortcut
            else draw.choice([[], [features]])
        )
        operands = [
            *images(parts),
            ((3, 3, *((features, channels) if flipped else (channels, features))), kind),
        ]
        matrix = (features, sum(residual)) if flipped else (sum(residual), features)
        operands += [*rows(shift, features), *images(residual), *[(matrix, kind)] * shortcut]
        counts = {'parts': np.int64(len(parts)), 'residuals': np.int64(len(residual))}
        flags = {'flipped': flipped, 'shift': shift}
        flags |= {'shortcut': shortcut, 'activation': activation}
        return Call('conv3x3', operands + rows(2 * activation), images([features]), counts | flags)

    def shortcut() -> Call:
        operands = [*images([features]), ((channels, features), kind)]
        return Call(
            'conv3x3_shortcut_gradient',
            operands,
            images(parts),
            {'residuals': np.int64(len(parts))},
        )

    def enlarged() -> tuple[tuple[int, ...], tuple[int, ...]]:
        # Shapes that GPUs take: the small image and the large one, without channels.
        nonlocal kind, batch, features, channels
        kind = draw.choice([jnp.float16, jnp.bfloat16])
        channels, features = (64 * draw.randint(1, 2) for _ in range(2))
        batch, height, width = draw.randint(1, 3), draw.randint(4, 6), draw.randint(4, 6)
        return (batch, height, width), (batch, 2 * height, 2 * width)

    def upsampled() -> Call:
        (small, large), flipped = enlarged(), draw.random() < 0.5
        ends = (features, channels) if flipped else (channels, features)
        operands = [
            ((*(large if flipped else small), channels), kind),
            ((2, 2, 2, 2, *ends), kind),
            *([] if flipped else rows(1, features)),
        ]
        results = [((*(small if flipped else large), features), kind)]
        return Call('conv3x3_upsampled', operands, results, {'flipped': flipped})

    def upsampled_weights() -> Call:
        small, large = enlarged()
        workspace = (16 * channels + 2 * batch) * features + draw.randint(0, 9)
        shapes = [(3, 3, channels, features), (draw.choice([1, batch]), features)]
        results = [(shape, draw.choice([jnp.float32, kind])) for shape in shapes]
        results += [((workspace,), jnp.float32)]
        operands = [((*small, channels), kind), ((*large, features), kind)]
        return Call('conv3x3_upsampled_weight_gradient', operands, results, {})

    def weights() -> Call:
        norm = draw.random() < 0.5
        residual = [draw.randint(1, 4) for _ in range(draw.randint(0, 2))]
        workspace = (9 * channels + sum(residual) + batch) * features + draw.randint(0, 9)
        shapes = [
            (3, 3, channels, features),
            (draw.choice([1, batch]), features),
            *([(sum(residual), features)] if residual else []),
        ]
        results = [(shape, draw.choice([jnp.float32, kind])) for shape in shapes]
        results += [((1, channels), jnp.float32)] * (2 * norm) + [((workspace,), jnp.float32)]
        attributes = {
            'parts': np.int64(len(parts)),
            'residuals': np.int64(len(residual)),
            'norm': norm,
        }
        operands = [*images(parts), *images([features]), *images(residual)]
        operands += [((batch, 2, channels), jnp.float32)] * norm
        return Call('conv3x3_weight_gradient', operands, results, attributes)

    def linear() -> Call:
        residual = draw.random() < 0.5
        operands = [
            *images([channels]),
            ((channels, features), kind),
            ((1, features), jnp.float32),
            *images([features] * residual),
        ]
        return Call('linear', operands, images([features]), {'residual': residual})

    def linear_weights() -> Call:
        workspace = (channels + batch) * features + draw.randint(0, 9)
        shapes = [(channels, features), (1, features)]
        results = [
            *((shape, draw.choice([jnp.float32, kind])) for shape in shapes),
            ((workspace,), jnp.float32),
        ]
        return Call(
            'linear_weight_gradient', [*images([channels]), *images([features])], results, {}
        )

    def several_weights() -> Call:
        members = [draw.choice([weights, linear_weights])() for _ in range(draw.randint(1, 3))]
        norms = draw.randint(0, 2)
        attributes: Attributes = {'members': np.int64(len(members)), 'norms': np.int64(norms)}
        for i, member in enumerate(members):
            attributes[f'linear_{i}'] = 'linear' in member.target
            attributes |= {f'{name}_{i}': value for name, value in member.attributes.items()}
        results = [result for member in members for result in member.results[:-1]]
        results += [((1, channels), jnp.float32)] * (2 * norms)
        sums: list[Shape] = [((batch, 2, channels), jnp.float32)] * norms
        workspace = sum(member.results[-1][0][0] for member in members)
        return Call(
            'weight_gradients',
            [operand for member in members for operand in member.operands] + sums,
            [*results, ((workspace,), jnp.float32)],
            attributes,
        )

    def layers() -> list[tuple[bool, int, int]]:
        """Returns, for 1 to 3 layers, whether it has a kernel, its features and its biases.

        The first one has a kernel: without any, x may have any size.
        """
        return [
            (i == 0 or draw.random() < 0.5, draw.randint(1, 9), draw.randint(1, 2))
            for i in range(draw.randint(1, 3))
        ]

    def projections() -> Call:
        operands, results = [((batch, channels), kind)], []
        found = layers()
        attributes: Attributes = {'layers': np.int64(len(found))}
        for i, (product, size, biases) in enumerate(found):
            operands += [((channels, size), kind)] * product + [((size,), jnp.float32)] * biases
            results.append(((batch if product else 1, size), jnp.float32))
            attributes |= {f'kernel_{i}': product, f'biases_{i}': np.int64(biases)}
        return Call('projections', operands, results, attributes)

    def projection_gradients() -> Call:
        operands, results, found = [((batch, channels), kind)], [], layers()
        for _, size, _ in found:
            operands += [((channels, size), kind), ((batch, size), jnp.float32)]
            results += [((channels, size), kind), ((size,), jnp.float32)]
        results += [((batch, channels), kind), ((len(found), batch, channels), jnp.float32)]
        return Call('projection_gradients', operands, results, {'layers': np.int64(len(found))})

    def norm(name: str, results: list[Shape], attributes: Attributes) -> Call:
        every = {
            'parts': np.int64(len(parts)),
            'groups': np.int64(channels),
            'eps': np.float32(1e-5),
        } | attributes
        per_channel: Shape = ((batch, channels), jnp.float32)
        return Call(
            name,
            [*images(parts), *rows(2)],
            [*results, *([per_channel] * (4 if not results else 2))],
            every,
        )

    def norm_forward() -> Call:
        return norm('group_norm_forward', images([channels]), {'silu': draw.random() < 0.5})

    def norm_statistics() -> Call:
        return norm('group_norm_statistics', [], {})

    def gradient(alone: bool = False) -> Call:
        """The backward call; `alone` leaves out act(z) and further gradients."""
        flags, added = (
            {name: draw.random() < 0.5 for name in ('silu', 'rounded', 'activation', 'samples')},
            0 if alone else draw.randint(0, 2),
        )
        flags['activation'] &= not alone
        attributes = {
            'parts': np.int64(len(parts)),
            'groups': np.int64(channels),
            'added': np.int64(added),
        } | flags
        affine = rows(4)
        results = [((batch, 2, channels), jnp.float32), *affine[: 2 * flags['samples']]]
        results += [*images(parts), *images([channels] * flags['activation'])]
        return Call(
            'group_norm_gradient',
            [*images(parts), *images([channels]), *affine, *images(parts * added)],
            results,
            attributes,
        )

    def with_dropout(call: Callable[[], Call]) -> Call:
        """A call with SiLU and one part, whose channels fill vectors of 16 bytes."""
        nonlocal parts, channels
        channels = draw.randint(1, 3) * 16 // jnp.dtype(kind).itemsize
        parts = [channels]
        whole = call()
        rates = {'silu': True, 'threshold': np.int64(2**16 - 1), 'factor': np.float32(1.5)}
        return Call(
            whole.target.replace('norm', 'norm_dropout'),
            [*whole.operands, ((batch, 2), jnp.uint32)],
            whole.results,
            whole.attributes | rates,
        )

    def dropout_forward() -> Call:
        return with_dropout(norm_forward)

    def dropout_gradient() -> Call:
        return with_dropout(functools.partial(gradient, alone=True))

    def tensors() -> list[Shape]:
        return [
            (tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3))), jnp.float32)
            for _ in range(draw.randint(1, 4))
        ]

    def gradients(of: list[Shape]) -> list[Shape]:
        return [(shape, draw.choice([jnp.float32, jnp.float16, jnp.bfloat16])) for shape, _ in of]

    def sums() -> Call:
        found, chunk = gradients(tensors()), draw.randint(1, 9)
        count = sum(-(-math.prod(shape) // chunk) for shape, _ in found)
        return Call(
            'sum_of_squares',
            found,
            [((count,), jnp.float32)],
            {'chunk': np.int64(chunk), 'tensors': np.int64(len(found))},
        )

    def adamw() -> Call:
        found, averages = tensors(), draw.randint(0, 2)
        constants = {
            name: np.float32(0.5) for name in ('b1', 'b2', 'rest1', 'rest2', 'eps', 'decay')
        }
        given = gradients(found)
        packed = draw.choice((0, 1, 2)) if len(found) > 1 else draw.choice((0, 1))
        if packed:
            cut = draw.randint(1, len(found) - 1) if packed == 2 else len(found)
            sizes = [
                sum(room(math.prod(s)) for s, _ in part) for part in (found[:cut], found[cut:])
            ]
            given = [((size,), draw.choice([jnp.float32, jnp.bfloat16])) for size in sizes[:packed]]
        copied = [draw.random() < 0.5 for _ in found] if draw.random() < 0.5 else []
        narrow = draw.choice([jnp.float16, jnp.bfloat16])
        copies = [(shape, narrow) for (shape, _), c in zip(found, copied, strict=False) if c]
        flags: Attributes = {f'copied_{i}': c for i, c in enumerate(copied)}
        flags['copies'] = bool(copied)
        counts = {
            'averages': np.int64(averages),
            'tensors': np.int64(len(found)),
            'packed': np.int64(packed),
        }
        updated = [*found * (3 + averages), *copies]
        operands = [((5 + averages,), jnp.float32), *given, *updated]
        attributes = constants | counts | flags
        return Call('adamw', operands, updated, attributes, in_place=1 + len(given))

    def narrow() -> Call:
        found, to = tensors(), draw.choice([jnp.float16, jnp.bfloat16])
        return Call(
            'narrow', found, [(shape, to) for shape, _ in found], {'tensors': np.int64(len(found))}
        )

    def pack() -> Call:
        found = gradients(tensors())
        size = sum(room(math.prod(shape)) for shape, _ in found)
        to = draw.choice([jnp.float32, jnp.bfloat16])
        return Call('pack', found, [((size,), to)], {'tensors': np.int64(len(found))})

    convolutions = [conv, shortcut, upsampled, weights, upsampled_weights]
    ops = [
        forward,
        backward,
        *convolutions,
        linear,
        linear_weights,
        several_weights,
        projections,
        projection_gradients,
        norm_forward,
        norm_statistics,
        gradient,
        dropout_forward,
        dropout_gradient,
        sums,
        adamw,
        narrow,
        pack,
    ]
    call = ops[number % len(HANDLERS)]()
    assert f'jaxunet_{call.target}' == HANDLERS[number % len(HANDLERS)]
    return call._replace(target=f'jaxunet_{call.target}')


MISTAKES = ['type', 'size', 'rank', 'missing', 'more', 'attribute', 'lost', 'unknown']


def spoil(call: Call, mistake: str, draw: random.Random) -> Call:
    """The call with one thing wrong."""
    operands, results, attributes = list(call.operands), list(call.results), dict(call.attributes)
    # An image whose statistics alone are wanted may have any height and width; an array to sum or
    # to pack may have any shape.
    free = mistake in ('size', 'rank') and any(
        name in call.target for name in ('statistics', 'sum_of_squares', 'pack')
    )
    arrays = results if free else draw.choice([operands, results])
    # So may a workspace, the last result.
    at = draw.randrange(
        len(arrays) - (mistake == 'size' and arrays is results and call.has_workspace)
    )
    shape, kind = arrays[at]
    name = draw.choice(sorted(attributes) or ['surplus'])
    if mistake == 'type':
        arrays[at] = (shape, draw.choice([jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64]))
    elif mistake == 'size':
        changed = list(shape)
        # Sums of a norm alone may be of any number of samples.
        first = int('norms' in attributes and len(shape) == 3)
        changed[draw.randrange(first, len(shape))] += 97  # more than any dimension could be
        arrays[at] = (tuple(changed), kind)
    elif mistake == 'rank':
        arrays[at] = (draw.choice([(), shape[1:], (*shape, 1)]), kind)
    elif mistake == 'missing' and len(arrays) > 1:
        del arrays[at]
    elif mistake == 'more':
        arrays.append((shape, kind))
    elif mistake == 'attribute':
        attributes[name] = draw.choice(
            [
                np.int64(-1),
                np.int64(0x7FFFFFFFFFFFFFFF),
                np.int32(1),
                np.float64(1),
                'one',
                np.ones(2, np.int64),
            ]
        )
    elif mistake == 'lost' and attributes:
        del attributes[name]
    else:
        attributes['surplus'] = np.int64(1)
    return call._replace(operands=operands, results=results, attributes=attributes)
