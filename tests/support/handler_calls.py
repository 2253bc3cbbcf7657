"""Valid calls of every FFI handler with random sizes, and the same calls with a mistake."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import xla_ffi  # noqa: F401  # registers the handlers
from jaxunet.ops.adamw.packed import room

F32 = jnp.float32
CPU = jax.local_devices(backend='cpu')[0]
Shape = tuple[tuple[int, ...], DTypeLike]
Attributes = dict[str, np.int64 | np.float32 | bool]


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


def _counts(**numbers: int) -> Attributes:
    return {name: np.int64(number) for name, number in numbers.items()}


class _Right:
    """Valid calls of random sizes: one method a handler, of its name."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._kind: DTypeLike = draw.choice([F32, jnp.float16, jnp.bfloat16])
        self._batch, height, width, self._features = (draw.randint(1, 3) for _ in range(4))
        self._image = self._batch, height, width
        self._split(*[draw.randint(1, 4) for _ in range(draw.randint(1, 3))])
        self._heads, self._tokens, self._head = (draw.randint(1, most) for most in (3, 4, 4))

    def _split(self, *parts: int) -> None:
        self._parts, self._channels = [*parts], sum(parts)

    def _images(self, *sizes: int) -> list[Shape]:
        return [((*self._image, size), self._kind) for size in sizes]

    def _rows(self, count: int, size: int = 0) -> list[Shape]:
        sizes = [self._draw.choice([1, self._batch]) for _ in range(count)]
        return [((rows, size or self._channels), F32) for rows in sizes]

    def _some(self) -> bool:
        return self._draw.random() < 0.5

    def _kinds(self, shapes: Sequence[tuple[int, ...]], *more: DTypeLike) -> list[Shape]:
        """Gives each of the results a type of its own: float32 or another."""
        return [(shape, self._draw.choice([F32, *(more or (self._kind,))])) for shape in shapes]

    def attention_forward(self) -> Call:
        width = self._heads * self._head
        qkv: list[Shape] = [((self._batch, self._tokens, 3 * width), self._kind)]
        out: Shape = ((self._batch, self._tokens, width), self._kind)
        lse: Shape = ((self._batch, self._heads, self._tokens), F32)
        return Call('attention_forward', qkv, [out, lse], _counts(heads=self._heads))

    def attention_backward(self) -> Call:
        call = self.attention_forward()
        operands = [*call.operands, *call.results, call.results[0]]
        return Call('attention_backward', operands, call.operands, call.attributes)

    def conv3x3(self) -> Call:
        channels, features = self._channels, self._features
        flipped, shift, activation, shortcut = (self._some() for _ in range(4))
        residual = (
            [self._draw.randint(1, 4) for _ in range(self._draw.randint(1, 2))]
            if shortcut
            else self._draw.choice([[], [features]])
        )
        ends = (features, channels) if flipped else (channels, features)
        matrix = (features, sum(residual)) if flipped else (sum(residual), features)
        operands = [*self._images(*self._parts), ((3, 3, *ends), self._kind)]
        operands += [*self._rows(shift, features), *self._images(*residual)]
        operands += [(matrix, self._kind)] * shortcut + self._rows(2 * activation)
        flags = {'flipped': flipped, 'shift': shift}
        flags |= {'shortcut': shortcut, 'activation': activation}
        attributes = _counts(parts=len(self._parts), residuals=len(residual)) | flags
        return Call('conv3x3', operands, self._images(features), attributes)

    def conv3x3_shortcut_gradient(self) -> Call:
        kernel: Shape = ((self._channels, self._features), self._kind)
        return Call(
            'conv3x3_shortcut_gradient',
            [*self._images(self._features), kernel],
            self._images(*self._parts),
            _counts(residuals=len(self._parts)),
        )

    def _enlarged(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # Shapes that GPUs take: the small image and the large one, without channels.
        draw = self._draw
        self._kind = draw.choice([jnp.float16, jnp.bfloat16])
        self._channels, self._features = (64 * draw.randint(1, 2) for _ in range(2))
        self._batch, height, width = draw.randint(1, 3), draw.randint(4, 6), draw.randint(4, 6)
        return (self._batch, height, width), (self._batch, 2 * height, 2 * width)

    def conv3x3_upsampled(self) -> Call:
        (small, large), flipped = self._enlarged(), self._some()
        channels, features = self._channels, self._features
        ends = (features, channels) if flipped else (channels, features)
        operands: list[Shape] = [
            ((*(large if flipped else small), channels), self._kind),
            ((2, 2, 2, 2, *ends), self._kind),
            *([] if flipped else self._rows(1, features)),
        ]
        result = ((*(small if flipped else large), features), self._kind)
        return Call('conv3x3_upsampled', operands, [result], {'flipped': flipped})

    def conv3x3_weight_gradient(self) -> Call:
        channels, features, draw = self._channels, self._features, self._draw
        norm = self._some()
        residual = [draw.randint(1, 4) for _ in range(draw.randint(0, 2))]
        workspace = (9 * channels + sum(residual) + self._batch) * features + draw.randint(0, 9)
        shapes = [(3, 3, channels, features), (draw.choice([1, self._batch]), features)]
        shapes += [(sum(residual), features)] * bool(residual)
        results = [*self._kinds(shapes), *[((1, channels), F32)] * (2 * norm), ((workspace,), F32)]
        operands = self._images(*self._parts, self._features, *residual)
        operands += [((self._batch, 2, channels), F32)] * norm
        attributes = _counts(parts=len(self._parts), residuals=len(residual)) | {'norm': norm}
        return Call('conv3x3_weight_gradient', operands, results, attributes)

    def conv3x3_upsampled_weight_gradient(self) -> Call:
        small, large = self._enlarged()
        channels, features, draw = self._channels, self._features, self._draw
        workspace = (16 * channels + 2 * self._batch) * features + draw.randint(0, 9)
        shapes = [(3, 3, channels, features), (draw.choice([1, self._batch]), features)]
        results = [*self._kinds(shapes), ((workspace,), F32)]
        operands = [((*small, channels), self._kind), ((*large, features), self._kind)]
        return Call('conv3x3_upsampled_weight_gradient', operands, results, {})

    def linear(self) -> Call:
        channels, features, residual = self._channels, self._features, self._some()
        weights: list[Shape] = [((channels, features), self._kind), ((1, features), F32)]
        operands = [*self._images(channels), *weights, *self._images(*[features] * residual)]
        return Call('linear', operands, self._images(features), {'residual': residual})

    def linear_weight_gradient(self) -> Call:
        channels, features = self._channels, self._features
        workspace = (channels + self._batch) * features + self._draw.randint(0, 9)
        results = [*self._kinds([(channels, features), (1, features)]), ((workspace,), F32)]
        return Call('linear_weight_gradient', self._images(channels, features), results, {})

    def weight_gradients(self) -> Call:
        draw, kinds = self._draw, [self.conv3x3_weight_gradient, self.linear_weight_gradient]
        members = [draw.choice(kinds)() for _ in range(draw.randint(1, 3))]
        norms = draw.randint(0, 2)
        attributes = _counts(members=len(members), norms=norms)
        for i, member in enumerate(members):
            attributes[f'linear_{i}'] = 'linear' in member.target
            attributes |= {f'{name}_{i}': value for name, value in member.attributes.items()}
        operands = [operand for member in members for operand in member.operands]
        operands += [((self._batch, 2, self._channels), F32)] * norms
        results = [result for member in members for result in member.results[:-1]]
        results += [((1, self._channels), F32)] * (2 * norms)
        workspace = sum(member.results[-1][0][0] for member in members)
        return Call('weight_gradients', operands, [*results, ((workspace,), F32)], attributes)

    def _layers(self) -> list[tuple[bool, int, int]]:
        """Returns, for 1 to 3 layers, whether it has a kernel, its features and its biases.

        The first one has a kernel: without any, x may have any size.
        """
        draw = self._draw
        return [
            (i == 0 or self._some(), draw.randint(1, 9), draw.randint(1, 2))
            for i in range(draw.randint(1, 3))
        ]

    def projections(self) -> Call:
        x, layers = (self._batch, self._channels), self._layers()
        operands, results, attributes = [(x, self._kind)], [], _counts(layers=len(layers))
        for i, (product, size, biases) in enumerate(layers):
            operands += [((self._channels, size), self._kind)] * product + [((size,), F32)] * biases
            results.append(((self._batch if product else 1, size), F32))
            attributes |= {f'kernel_{i}': product, f'biases_{i}': np.int64(biases)}
        return Call('projections', operands, results, attributes)

    def projection_gradients(self) -> Call:
        x, layers = (self._batch, self._channels), self._layers()
        operands, results = [(x, self._kind)], []
        for _, size, _ in layers:
            kernel = ((self._channels, size), self._kind)
            operands += [kernel, ((self._batch, size), F32)]
            results += [kernel, ((size,), F32)]
        results += [(x, self._kind), ((len(layers), *x), F32)]
        return Call('projection_gradients', operands, results, _counts(layers=len(layers)))

    def _norm(self, name: str, results: list[Shape], attributes: Attributes) -> Call:
        counts = _counts(parts=len(self._parts), groups=self._channels)
        return Call(
            name,
            [*self._images(*self._parts), *self._rows(2)],
            [*results, *[((self._batch, self._channels), F32)] * (2 if results else 4)],
            counts | {'eps': np.float32(1e-5)} | attributes,
        )

    def group_norm_forward(self) -> Call:
        return self._norm(
            'group_norm_forward', self._images(self._channels), {'silu': self._some()}
        )

    def group_norm_statistics(self) -> Call:
        return self._norm('group_norm_statistics', [], {})

    def group_norm_gradient(self, alone: bool = False) -> Call:
        """The backward call; `alone` leaves out act(z) and further gradients."""
        flags = {name: self._some() for name in ('silu', 'rounded', 'activation', 'samples')}
        added = 0 if alone else self._draw.randint(0, 2)
        flags['activation'] &= not alone
        counts = _counts(parts=len(self._parts), groups=self._channels, added=added)
        affine = self._rows(4)
        results: list[Shape] = [((self._batch, 2, self._channels), F32)]
        results += [*affine[: 2 * flags['samples']], *self._images(*self._parts)]
        results += self._images(*[self._channels] * flags['activation'])
        operands = [*self._images(*self._parts, self._channels), *affine]
        operands += self._images(*self._parts * added)
        return Call('group_norm_gradient', operands, results, counts | flags)

    def _with_dropout(self, call: Callable[[], Call]) -> Call:
        """A call with SiLU and one part, whose channels fill vectors of 16 bytes."""
        self._split(self._draw.randint(1, 3) * 16 // jnp.dtype(self._kind).itemsize)
        whole = call()
        rates = {'silu': True, 'threshold': np.int64(2**16 - 1), 'factor': np.float32(1.5)}
        return Call(
            whole.target.replace('norm', 'norm_dropout'),
            [*whole.operands, ((self._batch, 2), jnp.uint32)],
            whole.results,
            whole.attributes | rates,
        )

    def group_norm_dropout_forward(self) -> Call:
        return self._with_dropout(self.group_norm_forward)

    def group_norm_dropout_gradient(self) -> Call:
        return self._with_dropout(functools.partial(self.group_norm_gradient, alone=True))

    def _tensors(self) -> list[tuple[int, ...]]:
        draw = self._draw
        return [
            tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3)))
            for _ in range(draw.randint(1, 4))
        ]

    def _gradients(self, shapes: list[tuple[int, ...]]) -> list[Shape]:
        return self._kinds(shapes, jnp.float16, jnp.bfloat16)

    def sum_of_squares(self) -> Call:
        found, chunk = self._gradients(self._tensors()), self._draw.randint(1, 9)
        count = sum(-(-math.prod(shape) // chunk) for shape, _ in found)
        attributes = _counts(chunk=chunk, tensors=len(found))
        return Call('sum_of_squares', found, [((count,), F32)], attributes)

    def adamw(self) -> Call:
        draw, shapes = self._draw, self._tensors()
        averages, constants = draw.randint(0, 2), ('b1', 'b2', 'rest1', 'rest2', 'eps', 'decay')
        given = self._gradients(shapes)
        packed = draw.choice((0, 1, 2)) if len(shapes) > 1 else draw.choice((0, 1))
        if packed:
            cut = draw.randint(1, len(shapes) - 1) if packed == 2 else len(shapes)
            sizes = [sum(room(math.prod(s)) for s in part) for part in (shapes[:cut], shapes[cut:])]
            given = [((size,), draw.choice([F32, jnp.bfloat16])) for size in sizes[:packed]]
        copied = [self._some() for _ in shapes] if self._some() else []
        narrow = draw.choice([jnp.float16, jnp.bfloat16])
        updated: list[Shape] = [(shape, F32) for shape in shapes] * (3 + averages)
        updated += [(shape, narrow) for shape, c in zip(shapes, copied, strict=False) if c]
        attributes = _counts(averages=averages, tensors=len(shapes), packed=packed)
        attributes |= dict.fromkeys(constants, np.float32(0.5)) | {'copies': bool(copied)}
        attributes |= {f'copied_{i}': c for i, c in enumerate(copied)}
        operands = [((5 + averages,), F32), *given, *updated]
        return Call('adamw', operands, updated, attributes, in_place=1 + len(given))

    def narrow(self) -> Call:
        shapes, to = self._tensors(), self._draw.choice([jnp.float16, jnp.bfloat16])
        given, narrowed = ([(shape, kind) for shape in shapes] for kind in (F32, to))
        return Call('narrow', given, narrowed, _counts(tensors=len(shapes)))

    def pack(self) -> Call:
        found = self._gradients(self._tensors())
        size = sum(room(math.prod(shape)) for shape, _ in found)
        to = self._draw.choice([F32, jnp.bfloat16])
        return Call('pack', found, [((size,), to)], _counts(tensors=len(found)))


METHODS = [name for name in vars(_Right) if not name.startswith('_')]
HANDLERS = tuple(f'jaxunet_{name}' for name in METHODS)


def right(number: int, draw: random.Random) -> Call:
    """A valid call of random sizes; consecutive numbers go through all handlers."""
    call = getattr(_Right(draw), METHODS[number % len(METHODS)])()
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
