"""The ops on plain arrays: under every transformation, and with operands that do not fit."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxunet.ops import backends as seam
from jaxunet.ops import functional as kernels
from jaxunet.ops.adamw.operands import Tree
from jaxunet.ops.backends import fused_update
from jaxunet.ops.dropout import Dropout
from jaxunet.runtime.device import Target, use
from jaxunet.runtime.errors import UserError

Arguments = dict[str, jax.Array]
Carry = tuple[Tree, kernels.AdamWState]  # params, state
Function = Callable[[Arguments], jax.Array]

IMAGE, TOKENS = (8, 2, 2, 8), (8, 3, 24)
# The operands with a batch in front; the others are weights.
BATCHED = {
    'x': IMAGE,
    'part': IMAGE,
    'residual': IMAGE,
    'tokens': TOKENS,
    'rows': (8, 8),
    'short': (8, 3, 8),
    'seeds': (8, 2),
}
WEIGHTS = {
    'kernel': (3, 3, 8, 8),
    'wide': (3, 3, 16, 8),
    'scale': (16,),
    'offset': (16,),
    'bias': (8,),
    'shortcut': (8, 8),
    'matrix': (24, 8),
}


def dropped(x: jax.Array, rows: jax.Array, bias: jax.Array, seeds: jax.Array, *, backend: str):
    """GroupNorm with dropout, whose seeds are the bits of floating-point numbers."""
    words = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(seeds), jnp.uint32)
    return kernels.group_norm(
        x, rows, bias, groups=2, silu=True, dropout=Dropout(words, 0.25), backend=backend
    )


OPS: dict[str, tuple[tuple[str, ...], Callable[..., jax.Array]]] = {
    'conv3x3': (('x', 'kernel', 'rows'), kernels.conv3x3),
    'upsample_conv3x3': (('x', 'kernel', 'rows'), kernels.upsample_conv3x3),
    'norm_silu_conv3x3': (
        ('x', 'part', 'scale', 'offset', 'wide', 'bias', 'residual', 'shortcut'),
        lambda x, part, *weights, backend: kernels.norm_silu_conv3x3(
            [x, part],
            *weights[:4],
            residual=weights[4],
            shortcut=weights[5],
            groups=4,
            backend=backend,
        ),
    ),
    'group_norm': (
        ('x', 'rows', 'bias'),
        lambda *a, backend: kernels.group_norm(*a, groups=2, silu=True, backend=backend),
    ),
    'group_norm with dropout': (('x', 'rows', 'bias', 'seeds'), dropped),
    'attention': (
        ('tokens',),
        lambda qkv, backend: kernels.attention(qkv, num_heads=2, backend=backend),
    ),
    'linear': (
        ('tokens', 'matrix', 'bias', 'short'),
        lambda *a, backend: kernels.linear(*a[:3], residual=a[3], backend=backend),
    ),
}
CUDA = pytest.param('cuda', marks=pytest.mark.extension)
WITH_ADAMW = ['xla', CUDA]
MESH = Mesh(np.array(jax.local_devices(backend='cpu')[:2]), ('devices',))


@pytest.fixture(params=['xla', CUDA, 'pallas'], name='backend')
def _backend(request, monkeypatch) -> Iterator[str]:
    """Lets a backend run: the CUDA kernels' CPU handlers, Pallas's kernels interpreted."""
    monkeypatch.setattr(seam, '_unavailable', lambda name: None)
    with use(Target.INTERPRET) if request.param == 'pallas' else contextlib.nullcontext():
        yield request.param


def example(op: str) -> Arguments:
    draw = np.random.default_rng(0)
    shapes = BATCHED | WEIGHTS
    return {name: jnp.asarray(draw.normal(size=shapes[name]), jnp.float32) for name in OPS[op][0]}


def axes(arguments: Arguments) -> dict[str, int | None]:
    return {name: 0 if name in BATCHED else None for name in arguments}


def halves(arguments: Arguments) -> Arguments:
    """Splits the batch into two, on an axis in front."""
    return {
        name: a.reshape(2, a.shape[0] // 2, *a.shape[1:]) if name in BATCHED else a
        for name, a in arguments.items()
    }


def vmap(f: Function) -> Function:
    """Maps the activations only."""

    def mapped(a: Arguments) -> jax.Array:
        y = jax.vmap(f, in_axes=(axes(a),))(halves(a))
        return y.reshape(-1, *y.shape[2:])

    return mapped


def ensemble(f: Function) -> Function:
    """Maps everything: two networks on two halves of the batch."""

    def mapped(a: Arguments) -> jax.Array:
        twice = {n: v if n in BATCHED else jnp.stack([v, v]) for n, v in halves(a).items()}
        y = jax.vmap(f)(twice)
        return y.reshape(-1, *y.shape[2:])

    return mapped


def scan_of_remat(f: Function) -> Function:
    def scanned(a: Arguments) -> jax.Array:
        batched = {name: v for name, v in halves(a).items() if name in BATCHED}
        _, y = jax.lax.scan(lambda _, x: (None, jax.checkpoint(f)(a | x)), None, batched)
        return y.reshape(-1, *y.shape[2:])

    return scanned


def shard_map(f: Function, check: bool) -> Function:
    def split(a: Arguments) -> jax.Array:
        specs = {name: P('devices') if name in BATCHED else P() for name in a}
        return jax.shard_map(
            f, mesh=MESH, in_specs=(specs,), out_specs=P('devices'), check_vma=check
        )(a)

    return split


TRANSFORMATIONS: dict[str, Callable[[Function], Function]] = {
    'jit': lambda f: f,
    'vmap': vmap,
    'vmap of everything': ensemble,
    'scan of remat': scan_of_remat,
    'shard_map': lambda f: shard_map(f, check=False),
    'checked shard_map': lambda f: shard_map(f, check=True),
}
# Interpreting is slow: one program with all of them.
INTERPRETED: dict[str, Callable[[Function], Function]] = {
    'shard_map of scan of remat of vmap': lambda f: shard_map(scan_of_remat(vmap(f)), check=False)
}


def with_gradients(f: Function, arguments: Arguments) -> tuple[jax.Array, Arguments]:
    y, pull = jax.vjp(f, arguments)
    return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))[0]


def call(op: str, backend: str) -> Function:
    names, function = OPS[op]
    return lambda a: function(*(a[name] for name in names), backend=backend)


@functools.cache
def expected(op: str) -> tuple[jax.Array, Arguments]:
    return jax.jit(functools.partial(with_gradients, call(op, 'xla')))(example(op))


@pytest.mark.parametrize('op', OPS)
def test_values_and_gradients_under_every_transformation(op, backend):
    """Those of the reference, in one compiled program."""
    chosen = INTERPRETED if backend == 'pallas' else TRANSFORMATIONS
    found = jax.jit(
        lambda a: {
            name: with_gradients(transform(call(op, backend)), a)
            for name, transform in chosen.items()
        }
    )(example(op))
    for name, results in found.items():
        jax.tree.map(
            lambda got, exact, name=name: np.testing.assert_allclose(
                got, exact, rtol=1e-4, atol=1e-4, err_msg=name
            ),
            results,
            expected(op),
        )


RULE = {'learning_rate': 0.1, 'b1': 0.8, 'b2': 0.99, 'eps': 1e-6, 'weight_decay': 0.01}


@pytest.mark.parametrize('backend', WITH_ADAMW, indirect=True)
def test_adamw_is_that_of_optax_under_every_transformation(backend):
    """Two steps, for two networks: of a scan under vmap, and of a shard_map that is checked."""
    draw = np.random.default_rng(1)
    params, *gradients = (
        {'a': jnp.asarray(draw.normal(size=(2, 3, 5)), jnp.float32), 'b': jnp.ones((2, 4))}
        for _ in range(3)
    )

    def optax_steps(params: Tree) -> Tree:
        optimizer = optax.adamw(**RULE)
        state = optimizer.init(params)
        with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
            for gradient in gradients:
                updates, state = optimizer.update(gradient, state, params)
                params = optax.apply_updates(params, updates)
        return params

    def steps(params: Tree, gradients: Tree) -> Tree:
        def step(carry: Carry, gradient: Tree) -> tuple[Carry, None]:
            return kernels.adamw(gradient, *carry[::-1], **RULE, backend=backend), None

        (params, state), _ = jax.lax.scan(step, (params, kernels.adamw_init(params)), gradients)
        assert state.count.shape == ()
        return params

    both = jax.tree.map(lambda *g: jnp.stack(g), *gradients)
    want = optax_steps(params)
    mapped, split = jax.jit(
        lambda p, g: (
            jax.vmap(steps, in_axes=(0, 1))(p, g),
            jax.shard_map(steps, mesh=MESH, in_specs=P(), out_specs=P())(p, g),
        )
    )(params, both)
    for found in (mapped, split):
        jax.tree.map(
            lambda got, exact: np.testing.assert_allclose(got, exact, rtol=2e-6, atol=2e-6),
            found,
            want,
        )


def operands(op: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct((BATCHED | WEIGHTS)[name], jnp.float32) for name in OPS[op][0]
    }


def of(*shape: int, dtype: str = 'float32') -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


NHWC = r'expected \[batch, height, width, channels\]'
INTEGERS = r'int32; expected bfloat16, float16 or float32'
MISTAKES = [
    ('conv3x3', {'x': of(2, 2, 8)}, rf'conv3x3: x: shape \[2, 2, 8\]; {NHWC}'),
    ('conv3x3', {'x': of(8, 2, 2, 8, dtype='int32')}, f'conv3x3: x: {INTEGERS}'),
    ('conv3x3', {'kernel': of(3, 3, 8, 8, dtype='int32')}, f'conv3x3: kernel: {INTEGERS}'),
    ('conv3x3', {'kernel': of(3, 3, 9, 8)}, r'kernel: shape .*; expected \[3, 3, 8, features\]'),
    ('conv3x3', {'kernel': of(5, 5, 8, 8)}, r'kernel: shape .*; expected \[3, 3, 8, features\]'),
    ('conv3x3', {'rows': of(3, 8)}, r'shift: shape \[3, 8\]; expected \[1 or 8, 8\]'),
    ('conv3x3', {'rows': of()}, r'shift: shape \[\]; expected \[1 or 8, 8\]'),
    ('conv3x3', {'rows': of(8, dtype='int32')}, f'conv3x3: shift: {INTEGERS}'),
    ('upsample_conv3x3', {'x': of(2, 2, 8)}, rf'conv3x3: x: shape \[2, 2, 8\]; {NHWC}'),
    ('upsample_conv3x3', {'kernel': of(3, 3, 9, 8)}, r'expected \[3, 3, 8, features\]'),
    ('norm_silu_conv3x3', {'x': of(8, 2, 8)}, NHWC),
    ('norm_silu_conv3x3', {'part': of(8, 2, 3, 8)}, r'x.parts\[1\].*8, 2, 3, 8'),
    ('norm_silu_conv3x3', {'part': of(8, 2, 2, 8, dtype='bfloat16')}, r'x.parts\[1\].*bfloat16'),
    ('norm_silu_conv3x3', {'scale': of(8)}, r'scale: shape \[1, 8\]; expected \[1, 16\]'),
    ('norm_silu_conv3x3', {'offset': of(16, dtype='int32')}, f'group_norm: offset: {INTEGERS}'),
    ('norm_silu_conv3x3', {'residual': of(8, 2, 2, 6)}, r'shortcut: shape \[8, 8\]; expected'),
    (
        'norm_silu_conv3x3',
        {'part': of(8, 2, 2, 6), 'scale': of(14), 'offset': of(14), 'wide': of(3, 3, 14, 8)},
        '14 channels are not a multiple of 4 groups',
    ),
    ('group_norm', {'x': of(8, 4, 8)}, rf'group_norm: x.parts\[0\]: shape .*; {NHWC}'),
    ('group_norm', {'x': of(8, 2, 2, 8, dtype='int32')}, f'group_norm: x: {INTEGERS}'),
    ('group_norm', {'bias': of(9)}, r'offset: shape \[1, 9\]; expected \[1, 8\] or \[8, 8\]'),
    (
        'group_norm',
        {'x': of(8, 2, 2, 9), 'rows': of(9), 'bias': of(9)},
        '9 channels are not a multiple of 2 groups',
    ),
    ('attention', {'tokens': of(3, 24)}, r'qkv: shape \[3, 24\]; expected \[batch, tokens, packed'),
    ('attention', {'tokens': of(8, 3, 24, dtype='int32')}, f'attention: qkv: {INTEGERS}'),
    ('attention', {'tokens': of(8, 3, 25)}, '25 packed channels are not 3 x 2 heads'),
    ('linear', {'tokens': of(24)}, rf'linear: x: shape \[24\]; {NHWC}'),
    ('linear', {'tokens': of(8, 3, 24, dtype='int32')}, f'linear: x: {INTEGERS}'),
    ('linear', {'matrix': of(23, 8)}, r'kernel: shape \[23, 8\]; expected \[24, features\]'),
    ('linear', {'bias': of(8, 8)}, r'bias: shape \[8, 8\]; expected \[1, 8\]'),
    ('linear', {'bias': of(8, dtype='int32')}, f'linear: bias: {INTEGERS}'),
    ('linear', {'short': of(8, 4, 8)}, r'\[8, 4, 8\]; expected float32\[8, 3, 8\]'),
]
# Calls that the kernels refuse and the references take.
REFUSED = [
    ('conv3x3', {'x': of(8, 2, 2, 8, dtype='float64')}, 'conv3x3: x: float64; the kernels take'),
    (
        'norm_silu_conv3x3',
        {name: of(8, 2, 2, 8, dtype='float64') for name in ('x', 'part', 'residual')},
        'conv3x3: x: float64; the kernels take',
    ),
    ('group_norm', {'x': of(8, 2, 2, 8, dtype='float64')}, 'group_norm: x: float64; the kernels'),
    ('attention', {'tokens': of(8, 3, 24, dtype='float64')}, 'attention: qkv: float64; the kernel'),
    ('attention', {'tokens': of(8, 3, 6 * 257)}, 'heads of width 257: the kernels take widths up'),
    (
        'linear',
        {'tokens': of(8, 3, 24, dtype='float64'), 'short': of(8, 3, 8, dtype='float64')},
        'linear: x: float64; the kernels take',
    ),
]


def trace(op: str, changed: dict[str, jax.ShapeDtypeStruct], backend: str) -> None:
    arguments = operands(op) | changed
    jax.eval_shape(lambda a: OPS[op][1](*a, backend=backend), list(arguments.values()))


def test_what_does_not_fit_is_named(backend):
    for op, changed, message in MISTAKES:
        with pytest.raises(ValueError, match=message):
            trace(op, changed, backend)


def test_a_linear_layer_takes_any_number_of_dimensions(backend):
    draw = np.random.default_rng(2)
    x, residual, matrix = (
        jnp.asarray(draw.normal(size=size), jnp.float32) for size in ((24, 8), (24, 5), (8, 5))
    )

    def layer(*shape: int) -> jax.Array:
        images = x.reshape(*shape, 8)
        return kernels.linear(
            images, matrix, jnp.ones(5), residual=residual.reshape(*shape, 5), backend=backend
        )

    for shape in ((24,), (4, 6), (2, 3, 4), (2, 3, 2, 2), (2, 3, 2, 1, 2)):
        y = layer(*shape)
        assert y.shape == (*shape, 5)
        exact = x @ matrix + jnp.ones((1, 5)) + residual
        np.testing.assert_allclose(y.reshape(24, 5), exact, rtol=1e-4, atol=1e-4)


def test_upsampling_takes_parts_of_one_size_and_type(backend):
    for part, message in (
        (of(8, 1, 2, 8), r'x.parts\[1\] is float32\[8, 1, 2, 8\]; expected float32\[8, 2, 2,'),
        (of(8, 2, 2, 8, dtype='bfloat16'), r'x.parts\[1\] is bfloat16'),
    ):
        with pytest.raises(ValueError, match=f'conv3x3: {message}'):
            jax.eval_shape(
                lambda *a: kernels.upsample_conv3x3(a[:2], *a[2:], backend=backend),
                of(8, 2, 2, 8),
                part,
                of(3, 3, 16, 8),
                of(8),
            )


@pytest.mark.parametrize('backend', ['cuda'], indirect=True)
def test_the_cuda_kernels_take_four_parts(backend):
    rows, matrix = of(40), of(40, 8)

    def refused(op: str, name: str, call: Callable[..., jax.Array], *operands: object) -> None:
        with pytest.raises(ValueError, match=f'{op}: {name}: 5 parts; .* at most 4; concatenate'):
            jax.eval_shape(functools.partial(call, backend=backend), *operands)

    x = [of(*IMAGE)] * 5
    wide, narrow = of(3, 3, 40, 8), of(3, 3, 8, 8)
    refused('conv3x3', 'x', kernels.conv3x3, x, wide, of(8))
    norm = functools.partial(kernels.group_norm, groups=4)
    refused('group_norm', 'x', norm, x, rows, rows)
    refused('conv3x3', 'x', kernels.norm_silu_conv3x3, x, rows, rows, wide, of(8))

    def projected(image: jax.Array, *operands: Any, backend: str) -> jax.Array:
        *weights, residual, shortcut = operands
        options = {'residual': residual, 'shortcut': shortcut, 'backend': backend}
        return kernels.conv3x3(image, *weights, **options)

    refused('conv3x3', 'residual', projected, of(*IMAGE), narrow, of(8), x, matrix)


def test_the_references_take_what_the_kernels_refuse(backend):
    with jax.enable_x64(True):
        for op, changed, message in REFUSED:
            # Pallas's GroupNorm takes float64; its linear layer is XLA's.
            if backend == 'xla' or (backend == 'pallas' and op in ('group_norm', 'linear')):
                trace(op, changed, backend)
            else:
                with pytest.raises(ValueError, match=message):
                    trace(op, changed, backend)


def test_auto_takes_the_reference_for_types_that_kernels_refuse(monkeypatch):
    monkeypatch.setattr(seam, '_unavailable', lambda name: None)
    with jax.enable_x64(True), use(Target.HOPPER):
        for op, changed, message in REFUSED:
            if 'float64' in message:
                trace(op, changed, 'auto')


@pytest.mark.parametrize('backend', WITH_ADAMW, indirect=True)
@pytest.mark.parametrize(
    ('changed', 'message'),
    [
        ({'learning_rate': jnp.ones(3)}, r'adamw: learning_rate: shape \[3\]; expected a scalar'),
        (
            {'params': {'a': jnp.ones(4)}},
            'adamw: params: shapes differ from those of the gradients',
        ),
        (
            {'params': {'a': jnp.ones(3, jnp.bfloat16)}},
            'adamw: params: expected float32, found bfloat16',
        ),
        ({'gradients': {'a': jnp.ones(3, jnp.int32)}}, 'adamw: gradients: expected .* found int32'),
        ({'gradients': {}}, 'adamw: gradients: no arrays'),
        # The kernels would pair the arrays by their order.
        ({'gradients': {'b': jnp.ones(3)}}, 'adamw: gradients: its tree has another structure'),
    ],
)
def test_what_adamw_does_not_take(changed, message, backend):
    tree = {'a': jnp.ones(3)}
    good = {'gradients': tree, 'state': kernels.adamw_init(tree), 'params': tree}
    with pytest.raises(ValueError, match=message):
        kernels.adamw(**(good | {'learning_rate': 0.1} | changed), backend=backend)


@pytest.mark.extension
def test_averages_need_a_share_each():
    tree = {'a': jnp.ones(3)}
    one = jnp.ones(())
    with pytest.raises(ValueError, match='adamw: follow: 0 shares for 1 averages'):
        fused_update('cuda').adamw(
            kernels.Rule(0.9, 0.99, 1e-8, 0.0),
            *[tree] * 4,
            [tree],
            take=one,
            factor=one,
            learning_rate=one,
            corrections=(one, one),
            follow=(),
        )


def test_pallas_refuses_a_checked_shard_map():
    def attend(a: Arguments) -> jax.Array:
        return kernels.attention(a['tokens'], num_heads=2, backend='pallas')

    with use(Target.INTERPRET), pytest.raises(ValueError, match='check_vma=False only; pass that'):
        jax.eval_shape(shard_map(attend, check=True), {'tokens': of(8, 3, 24)})


@pytest.mark.skipif(jax.default_backend() == 'gpu', reason='a machine without a GPU says so')
def test_a_backend_that_does_not_run_here_is_named():
    with pytest.raises(UserError, match='backend=pallas: Pallas kernels need an NVIDIA GPU'):
        kernels.attention(jnp.ones((1, 3, 24)), num_heads=2, backend='pallas')
