"""Backends of other packages that fail or return something else: one line names backend and op."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxunet.ops import backends
from jaxunet.ops.activation import Activation
from jaxunet.ops.adamw.operands import Constants
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.dropout import Dropout
from jaxunet.ops.functional import linear
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.linear.projections import Projection
from jaxunet.ops.references import UPDATE, VARIANTS
from jaxunet.runtime import plugins
from jaxunet.runtime.command import _without_traceback
from jaxunet.runtime.errors import UserError

BACKEND = """
    import functools, sys
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jaxunet.ops.activation import Activation
    from jaxunet.ops.references import UPDATE, XLA
    from jaxunet.runtime.plugins import Backend

    def wrong(change, op):
        def call(*operands, **options):
            return change(op(*operands, **options))
        return call

    def fails(*operands, **options):
        raise ZeroDivisionError('a\\x1b[31m bug')

    def ends(*operands, **options):
        sys.exit(3)

    def refuses(*operands, **options):
        from jaxunet.runtime.errors import UserError
        raise UserError('heads of 7 channels')

    def with_gradient(gradient):
        def make(op):
            called = jax.custom_vjp(lambda x, k, b: op(x, k, b))
            called.defvjp(lambda x, k, b: (op(x, k, b), (x, k, b)), gradient)
            return lambda x, k, b, *, residual=None: called(x, k, b)
        return make

    BACKEND = Backend(**(dict(
        name='toy', title='toy kernels', api={api}, ops={{}}, unavailable=lambda: None
    ) | dict({fields})))
"""
RECORDS = {
    "name='other'": r"name: expected 'toy', as its entry point, found 'other'",
    'name=3': r"name: expected 'toy', as its entry point, found 3",
    'title=None': r'title: expected text, found None',
    "api='3'": r"implements version '3' of the kernel interface",
    'api=None': r'implements version None of the kernel interface',
    'api=True': r'implements version True of the kernel interface',
    'ops=[fails]': r'ops: expected a mapping of functions by op, found \[function\]',
    'ops=None': r'ops: expected a mapping of functions by op, found None',
    "ops={'conv5x5': fails}": r"ops: expected some of conv3x3, .*, project, found 'conv5x5'",
    'ops={3: fails}': r'ops: expected some of conv3x3, .*, project, found 3',
    "ops={'linear': 3}": r"ops\['linear'\]: expected a function, found 3",
    "ops={'linear': None}": r"ops\['linear'\]: expected a function, found None",
    "ops={'adamw': fails}": r"ops\['adamw'\]: expected a FusedUpdate, found a function",
    "ops={'adamw': UPDATE._replace(narrow=1)}": r"\['adamw'\].narrow: expected a function, found 1",
    'unavailable=None': r'unavailable: expected a function, found None',
    'unavailable=fails': r'unavailable\(\): ZeroDivisionError: a\\x1b\[31m bug \(.*kernels.py',
    'unavailable=ends': r'unavailable\(\): SystemExit: 3 ',
    'unavailable=lambda x: None': r'unavailable\(\): TypeError: .*missing 1 required',
    'unavailable=lambda: False': r'unavailable\(\): expected None, or text .*, found False',
    'transform_gradients=None': r'transform_gradients: expected a function, found None',
    'color=3': r'cannot be imported: TypeError: .*color.* \(.*toy_kernels.py, line ',
    'ops=dict(linear=sys.exit(3))': r'cannot be imported: SystemExit: 3 \(.*toy_kernels.py, line ',
    "ops={}['']": r'cannot be imported: KeyError: ',
    'ops=next(iter([]))': r'cannot be imported: StopIteration: no message \(.*toy_kernels.py, ',
    'ops=1 / 0': r'cannot be imported: ZeroDivisionError: division by zero \(.*toy_kernels.py, ',
}
CHANGES = {  # what an op does with the reference's result, and the words for it
    'lambda y: jax.tree.map(lambda a: a[..., :1], y)': r' returned .*: .*expected .*, found .*',
    'lambda y: jax.tree.map(lambda a: a[None], y)': r' returned .*: .*expected .*, found .*',
    'lambda y: jax.tree.map(lambda a: a.astype(jnp.float16), y)': r' returned .*float16\[',
    'lambda y: None': r' returned .*: expected .*, found None',
    'lambda y: (y, y)': r' returned .*: expected .*, found \(',
    'lambda y: []': r' returned .*: expected .*, found ',
    "lambda y: 'text'": r" returned .*: expected .*, found 'text'",
    'lambda y: y.unknown': r': AttributeError: .*unknown.*\(.*toy_kernels.py, line ',
    'fails': r': ZeroDivisionError: a\\x1b\[31m bug \(.*toy_kernels.py, line ',
    'ends': r': SystemExit: 3 \(.*toy_kernels.py, line ',
    'refuses': r': heads of 7 channels',
}
X, KERNEL, ROW = jnp.ones((2, 4, 4, 32)), jnp.ones((3, 3, 32, 32)), jnp.ones((1, 32))
PLAIN = Convolution(image=Activation.of(X), kernel=KERNEL, shift=ROW)
NORM = Norm(ROW, ROW)
FUSED = dataclasses.replace(PLAIN, norm=NORM)
CALLS = {  # operands and options of each op and variant
    'conv3x3': ((PLAIN,), {}),
    'upsample_conv3x3': ((PLAIN,), {}),
    'norm_silu_conv3x3': ((FUSED,), {}),
    'norm_silu_conv3x3_and_input': ((FUSED,), {'copies': 2}),
    'group_norm': ((PLAIN.image, NORM), {'silu': True}),
    'group_norm_and_input': ((PLAIN.image, NORM), {}),
    'attention': ((jnp.ones((2, 16, 96)),), {'num_heads': 1}),
    'linear': ((X, jnp.ones((32, 32)), ROW), {}),
    'project': ((X[:, 0, 0], [Projection(jnp.ones((32, 32)), (ROW[0],))] * 2), {}),
}


@pytest.mark.parametrize(('fields', 'message'), RECORDS.items())
def test_a_wrong_record_is_one_line(install, fields, message):
    install(BACKEND, fields=fields)
    # `choose` asks only the backends of some op whether they run.
    asked = (backends.choose, lambda name: plugins.load_backend(name).unavailable())
    with pytest.raises(UserError, match=rf'^backend=toy: .*{message}') as found:
        [ask('toy') for ask in asked]
    assert str(found.value).isprintable()


def test_a_package_that_ends_the_process_is_named_before(install, caplog):
    caplog.set_level('INFO')
    install(BACKEND, fields='')
    backends.choose('toy')
    assert 'backend=toy: importing toy_kernels:BACKEND of toy 1.2' in caplog.text


@pytest.mark.parametrize(('change', 'message'), CHANGES.items())
@pytest.mark.parametrize('op', CALLS)
def test_a_wrong_op_is_one_line(install, op, change, message):
    """As the op is traced, and before anything runs."""
    made = change if change in ('fails', 'ends', 'refuses') else f'wrong({change}, XLA.{op})'
    plain = VARIANTS.get(op, op)
    install(BACKEND, fields=f"ops={{'{plain}': XLA.{plain}, '{op}': {made}}}")
    operands, options = CALLS[op]
    call = getattr(backends.choose('toy').ops, op)
    with pytest.raises(UserError, match=rf'^backend=toy: {op}{message}') as found:
        jax.eval_shape(lambda: call(*operands, **options))
    assert str(found.value).isprintable()


@pytest.mark.parametrize(
    ('part', 'change', 'message'),
    [
        ('sum_of_squares', 'lambda y: y[None]', r'expected float32\[\], found float32\[1\]'),
        ('sum_of_squares', 'lambda y: 3.0', r'expected float32\[\], found 3.0'),
        ('narrow', 'list', r'expected \(bfloat16\[3\]\), found list\(bfloat16\[3\]\)'),
        ('narrow', 'lambda y: y * 2', r'expected \(bfloat16\[3\]\), found \(bfloat16\[3\], '),
        ('adamw', 'lambda y: tuple(y)', r'expected AdamWResult\(.*, found \('),
        (
            'adamw',
            "lambda y: y._replace(mu={'w': y.mu['w'].astype(jnp.bfloat16)})",
            r"\.mu\['w'\]: expected float32\[3\], found bfloat16\[3\]",
        ),
        ('adamw', "lambda y: y._replace(nu={'v': y.nu['w']})", 'expected .*, found '),
    ],
)
def test_a_wrong_part_of_adamw_is_one_line(install, part, change, message):
    changed = f'{part}=wrong({change}, UPDATE.{part})'
    install(BACKEND, fields=f"ops={{'adamw': UPDATE._replace({changed})}}")
    kernels, tree, one = backends.choose('toy').update, {'w': jnp.ones(3)}, jnp.ones(())
    calls = {
        'sum_of_squares': lambda: kernels.sum_of_squares(tree),
        'narrow': lambda: kernels.narrow([jnp.ones(3)], jnp.bfloat16),
        'adamw': lambda: kernels.adamw(
            *(Constants(0.9, 0.999, 1e-8, 0.0), tree, tree, tree, tree, ()),
            take=jnp.ones((), jnp.bool_),
            factor=one,
            learning_rate=one,
            corrections=(one, one),
            follow=(),
        ),
    }
    with pytest.raises(UserError, match=rf'^backend=toy: adamw.{part} returned .*: {message}'):
        jax.eval_shape(calls[part])


@pytest.mark.parametrize(
    ('gradient', 'message'),
    [
        (
            'lambda kept, y: fails()',
            r'ZeroDivisionError: a\\x1b\[31m bug \(.*toy_kernels.py, line ',
        ),
        ('lambda kept, y: ends()', 'SystemExit: 3 '),
        ('lambda kept, y: kept[:2]', '(TypeError|ValueError): '),
        ('lambda kept, y: (kept[0][:1], *kept[1:])', '(TypeError|ValueError): '),
        (
            'lambda kept, y: (kept[0].astype(jnp.bfloat16), *kept[1:])',
            'TypeError: .*expected float32.*found bfloat16',
        ),
    ],
)
def test_a_wrong_gradient_is_one_line(install, gradient, message):
    install(BACKEND, fields=f"ops={{'linear': with_gradient({gradient})(XLA.linear)}}")
    operands, _ = CALLS['linear']
    gradient_of = jax.grad(lambda *arrays: linear(*arrays, backend='toy').sum(), (0, 1, 2))
    with pytest.raises(UserError, match=rf'^backend=toy: the gradient of linear: ({message})'):
        jax.eval_shape(gradient_of, *operands)


@pytest.mark.parametrize(
    ('transform', 'message'),
    [
        ('fails', 'transform_gradients: ZeroDivisionError: '),
        ('lambda f: f', 'transform_gradients: TypeError: '),
        ('lambda f, devices: None', r'transform_gradients\(...\): expected a function, found None'),
        ('lambda f, devices: fails', r'transform_gradients\(...\): ZeroDivisionError: '),
        (
            'lambda f, devices: lambda x: f(x)[:1]',
            r'transform_gradients\(...\) returned .*: expected float32\[3\], found float32\[1\]',
        ),
    ],
)
def test_a_wrong_transformation_is_one_line(install, transform, message):
    fields = "'conv3x3': XLA.conv3x3, 'norm_silu_conv3x3': XLA.norm_silu_conv3x3"
    install(BACKEND, fields=f'ops={{{fields}}}, transform_gradients={transform}')
    with pytest.raises(UserError, match=rf'^backend=toy: {message}'):
        jax.eval_shape(backends.choose('toy').transform(lambda x: x, 1), jnp.ones(3))


def test_a_right_backend_computes_what_it_did(install):
    """Values and gradients pass through the checks, under jit, vmap and remat."""
    ops = ', '.join(f"'{op}': XLA.{op}" for op in CALLS)
    install(BACKEND, fields=f"ops={{{ops}, 'adamw': UPDATE}}")
    toy, xla = backends.choose('toy').ops, backends.choose('xla').ops
    assert toy == backends.choose('toy').ops  # the same functions to JAX
    key = jax.random.key(0)
    for op, (operands, options) in CALLS.items():
        drawn = jax.tree.map(lambda a: jax.random.normal(key, a.shape), operands)
        both = []
        for ops in (toy, xla):
            call = jax.checkpoint(functools.partial(getattr(ops, op), **options))

            def total(values, call=call):
                return sum((result**2).sum() for result in jax.tree.leaves(call(*values)))

            both.append(jax.jit(jax.value_and_grad(total))(drawn))
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *both)), op
    dropped = Dropout(jnp.ones((2, 2), jnp.uint32), 0.5)
    norm = [o.group_norm(*CALLS['group_norm'][0], dropout=dropped) for o in (toy, xla)]
    assert (norm[0] == norm[1]).all()
    assert backends.choose('toy').update.sum_of_squares({'w': X}) == UPDATE.sum_of_squares({'w': X})
    mapped = jax.vmap(lambda x: linear(x, *CALLS['linear'][0][1:], backend='toy'))(X[None])
    assert mapped.shape == (1, *X.shape)


def test_parts_of_an_activation_are_free(install):
    split = 'lambda y: Activation((y.value[..., :8], y.value[..., 8:]))'
    install(BACKEND, fields=f"ops={{'conv3x3': wrong({split}, XLA.conv3x3)}}")
    assert backends.choose('toy').ops.conv3x3(*CALLS['conv3x3'][0]).channels == 32


def test_a_failure_while_a_program_runs_names_the_backend(install, capsys):
    callback = (
        'lambda x, k, b, *, residual=None: '
        'jax.pure_callback(fails, jax.ShapeDtypeStruct(x.shape, x.dtype), x)'
    )
    install(BACKEND, fields=f"ops={{'linear': {callback}}}")

    def main(argv):
        jax.block_until_ready(jax.jit(backends.choose('toy').ops.linear)(*CALLS['linear'][0]))

    with pytest.raises(SystemExit) as ended:
        _without_traceback(main)(['x'])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.startswith('error: ')]
    assert re.fullmatch(
        r'error: backend=toy: its code: JaxRuntimeError: ZeroDivisionError: a\\x1b\[31m bug '
        r'\(.*toy_kernels.py, line \d+\); mend or update its package, or use backend=xla',
        line,
    )
    assert plugins.at_fault(ValueError('of something else')) is None
