"""`python -m jaxunet.benchmark`: its sides compute what they say, its arithmetic is right, and
nothing that fails is lost.
"""

from __future__ import annotations

import gc
import importlib.util
import pathlib
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import call
from support.tiny import flags, tiny_config

from jaxunet.benchmark import choose, run, table
from jaxunet.benchmark.cases import DEFAULT_DIRECTIONS, Plan, Prepared, Sampling, Side, make_plan
from jaxunet.benchmark.device import Rates, measure_rates
from jaxunet.benchmark.jax_side import (
    model_loss,
    peak_bytes,
    random_inputs,
    synthetic_source,
    timed_compile,
)
from jaxunet.benchmark.timing import (
    TURN_SECONDS,
    interleave,
    steps_in,
    summarise,
    turn_steps,
    turns,
)
from jaxunet.benchmark.traffic import bytes_moved
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import Config
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model import blocks
from jaxunet.model.unet import build_unet
from jaxunet.ops.backends import XLA, load_ops
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError

FIELDS = {
    'kind', 'time', 'git', 'device', 'devices', 'driver', 'versions', 'command', 'config', 'images', 'precision',  # noqa: E501
    'batch_size', 'rounds', 'steps_per_round', 'matmul_flops', 'copy_bytes_per_s', 'forward_flops', 'backend', 'direction', 'reference',  # noqa: E501
    'error',
}  # fmt: skip
MEASURED = {
    'median_ms', 'quartiles_ms', 'ratio', 'ratio_quartiles', 'images_per_second', 'mfu', 'bytes_moved', 'bandwidth_share', 'peak_bytes',  # noqa: E501
    'lower_s', 'compile_s', 'steps_per_call', 'concurrent_kernels', 'ops', 'bytes_source', 'peak_source',  # noqa: E501
}  # fmt: skip


def plan(config: Config | None = None, **changes: list[str] | int) -> Plan:
    lists: dict[str, list[str] | int] = {
        name: [] for name in ('backends', 'peers', 'precisions', 'batch_sizes', 'directions')
    }
    return make_plan(
        'tiny', config or tiny_config(), **(lists | {'rounds': 2, 'steps': 1} | changes)
    )


def test_command_line(tmp_path: pathlib.Path) -> None:
    """Rows of every direction, shares that follow from them, a table that is printed again from the
    file.
    """
    output = tmp_path / 'rows.jsonl'
    options = ['--backends=xla', '--batch_sizes=4', '--rounds=3', '--steps=2', f'--output={output}']
    printed = call('jaxunet.benchmark', *flags(), *options)
    found = rows.read(output)
    assert [row['direction'] for row in found] == list(DEFAULT_DIRECTIONS)
    for row in found:
        assert set(row) == FIELDS | MEASURED
        assert (row['backend'], row['batch_size'], row['config'], row['error']) == (
            'xla',
            4,
            'digits',
            None,
        )
        low, high = row['quartiles_ms']
        assert 0 < low <= row['median_ms'] <= high
        assert row['ratio'] == 1
        seconds = row['median_ms'] / 1e3
        np.testing.assert_allclose(row['images_per_second'], 4 / seconds)
        passes = 1 if row['direction'] == 'forward' else 3
        np.testing.assert_allclose(
            row['mfu'], passes * row['forward_flops'] / seconds / row['matmul_flops']
        )
        np.testing.assert_allclose(
            row['bandwidth_share'], row['bytes_moved'] / seconds / row['copy_bytes_per_s']
        )
        assert row['lower_s'] > 0
        assert row['compile_s'] > 0
    forward, backward, step = found
    assert forward['bytes_moved'] < backward['bytes_moved'] < step['bytes_moved']
    assert forward['peak_bytes'] < backward['peak_bytes'] < step['peak_bytes']
    assert call('jaxunet.benchmark', f'--table={output}') == printed
    assert printed.count('\n| digits |') == 3


def test_sampling_is_held_against_the_network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, 'measure_rates', lambda precision: Rates(1e12, 1e12))
    wanted = plan(
        backends=['xla'], batch_sizes=['4'], directions=['sample'], sampling=Sampling(8, 5)
    )
    (row,) = run.run(wanted, synthetic_source(wanted.config), 'x')
    alone = {'sampled_images', 'network_ms', 'share_of_network', 'sampler'}
    assert set(row) == FIELDS | MEASURED | alone
    assert (row['sampler'], row['sampled_images'], row['error']) == ('ddim, 5 steps', 8, None)
    assert row['steps_per_round'] == 2  # whole turns of 8 images, in batches of 4
    assert row['steps_per_call'] == 1
    assert row['network_ms'] > 0
    assert row['share_of_network'] > 0
    seconds = row['median_ms'] / 1e3
    np.testing.assert_allclose(row['images_per_second'], 4 / seconds)
    np.testing.assert_allclose(row['mfu'], 5 * row['forward_flops'] / seconds / 1e12)
    shown = f'| sample, {row["share_of_network"]:.0%} of the network alone | xla |'
    assert shown in table.markdown([row])


def test_a_side_that_cannot_run_is_a_row(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that fails while it is timed; the others go on, and ratios are to the first even
    where the second is gone.
    """

    def fake(name: str, *_: object) -> Side:
        if name == 'missing':
            raise UserError('this machine has no such kernels')

        class Fake:
            def prepare(self, direction: str) -> Prepared:
                def work(steps: int) -> None:
                    if name == 'dies' and direction == 'step':
                        raise RuntimeError('out of memory')

                return Prepared(work, 0.1, 0.2, 10, 20, {}, lambda: None)

        return Fake()

    monkeypatch.setattr(run, 'make_side', fake)
    monkeypatch.setattr(run, 'measure_rates', lambda precision: Rates(1e9, 1e9))
    wanted = plan()._replace(sides=('a', 'missing', 'dies'))
    found = list(run.run(wanted, synthetic_source(wanted.config), 'x'))
    seen = [(row['backend'], row['direction'], row['error']) for row in found]
    assert seen == [
        ('missing', 'all', 'this machine has no such kernels'),
        ('a', 'forward', None),
        ('dies', 'forward', None),
        ('a', 'forward+backward', None),
        ('dies', 'forward+backward', None),
        ('a', 'step', None),
        ('dies', 'step', 'RuntimeError: out of memory'),
    ]
    text = table.markdown(found)
    assert 'error: this machine has no such kernels' in text
    assert {row.count('|') for row in text.splitlines() if row.startswith('|')} == {
        len(table.HEAD) + 1
    }


@pytest.mark.long
def test_exit_status_tells_of_missing_sides(tmp_path: pathlib.Path) -> None:
    """Several sides: what runs is measured and the status is 1. One alone: an error at once."""
    missing = [name for name in ('pallas', 'cuda') if not available(name)]
    if not missing:
        pytest.skip('this machine has every backend')
    options = [
        *flags(),
        '--rounds=1',
        '--steps=1',
        '--directions=forward',
        f'--output={tmp_path / "rows.jsonl"}',
    ]
    message = call('jaxunet.benchmark', *options, f'--backends=xla,{missing[0]}', code=1)
    assert f'error: {missing[0]}, float32, batch 8, all: backend={missing[0]}' in message
    assert [
        (row['backend'], row['error'] is None) for row in rows.read(tmp_path / 'rows.jsonl')
    ] == [(missing[0], False), ('xla', True)]
    assert call('jaxunet.benchmark', *options, f'--backends={missing[0]}', code=2).startswith(
        f'error: backend={missing[0]}'
    )


def available(backend: str) -> bool:
    try:
        load_ops(backend)
    except UserError:
        return False
    return True


def test_dry_run_prints_the_cases() -> None:
    options = [
        '--batch_sizes=4,8',
        '--precisions=bfloat16,float32',
        '--directions=step,forward',
        '--dry_run',
    ]
    lines = call('jaxunet.benchmark', *flags(), *options).splitlines()
    assert len(lines) == 8
    assert (
        lines[0]
        == 'digits, bfloat16, batch 4, forward: auto; 10 rounds of about 0.5 s, at least 10 steps'
    )
    assert (
        lines[-1]
        == 'digits, float32, batch 8, step: auto; 10 rounds of about 0.5 s, at least 10 steps'
    )
    file = pathlib.Path(__file__).parents[2] / 'configs' / 'elephants64.py'
    printed = call(
        'jaxunet.benchmark',
        f'--config={file}',
        '--directions=step',
        '--rounds=3',
        '--steps=7',
        '--dry_run',
    )
    assert printed == 'elephants64, bfloat16, batch 32, step: auto; 3 rounds of 7 steps\n'


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'backends': ['pallsa']}, '--backends: .*did you mean "pallas"'),
        ({'peers': ['torch']}, '--peers: expected some of pytorch'),
        ({'precisions': ['half']}, '--precisions: .*float16'),
        ({'directions': ['back']}, '--directions: .*forward'),
        ({'batch_sizes': ['32', '-1']}, "--batch_sizes: .*'-1'"),
        (
            {'peers': ['pytorch'], 'directions': ['sample']},
            '--directions: the peers draw no samples',
        ),
        (
            {'config': tiny_config(train={'steps_per_call': 2, 'log_every': 2}), 'steps': 5},
            r'--steps: 5 is not a multiple of train.steps_per_call \(2\)',
        ),
        ({'rounds': 0}, '--rounds: expected 1 or more, found 0'),
        ({'config': tiny_config(parallel={'devices': 2})}, 'parallel.devices: .* found 2'),
        (
            {'config': tiny_config(optimizer={'accumulate_steps': 2})},
            'optimizer.accumulate_steps: .* found 2',
        ),
    ],
)
def test_mistakes(changes: dict[str, list[str] | int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(**changes)


def test_peers_need_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match=r'pip install "jaxunet\[peers\]"'):
        plan(peers=['pytorch'])


def test_sides_take_turns() -> None:
    """Forwards and backwards; each turn is timed alone, and a ratio is of one round, so a drift
    cancels.
    """
    assert turns(['a', 'b', 'c'], 3) == [['a', 'b', 'c'], ['c', 'b', 'a'], ['a', 'b', 'c']]
    now, speed, done = [0.0], {'a': 1.0, 'b': 2.0}, []

    def side(name: str) -> Callable[[int], None]:
        def work(steps: int) -> None:
            done.append(name)
            now[0] += (
                steps * speed[name] * (1 + len(done) // 2 * 3)
            )  # from round to round the machine slows down

        return work

    times = interleave(
        {name: side(name) for name in speed}, rounds=3, steps=5, clock=lambda: now[0]
    )
    assert done == ['a', 'b', 'b', 'a', 'a', 'b']
    assert {name: len(t) for name, t in times.items() if isinstance(t, list)} == {'a': 3, 'b': 3}
    first = times['a']
    assert isinstance(first, list)
    assert first[0] == 1000
    quick = summarise([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 4.0, 6.0, 8.0, 5.0])
    assert quick == (3.0, (2.0, 4.0), 0.5, (0.5, 0.5))


def test_a_turn_takes_half_a_second() -> None:
    now = [0.0]

    def work(speed: float) -> Callable[[int], None]:
        return lambda steps: now.__setitem__(0, now[0] + steps * speed)

    quick, slow = (
        steps_in(TURN_SECONDS, work(speed), clock=lambda: now[0]) for speed in (1 / 256, 1 / 64)
    )
    assert (quick, slow) == (128, 32)
    assert turn_steps([slow, quick]) == quick
    assert turn_steps([quick, 20]) == 80  # or the slowest would take more than two seconds
    assert turn_steps([1]) == turn_steps([]) == 10
    calls = []
    assert (
        steps_in(
            TURN_SECONDS,
            lambda steps: (calls.append(steps), work(1 / 256)(steps)),
            20,
            lambda: now[0],
        )
        == 128
    )
    assert calls == [20, 40]
    assert turn_steps([128], 20) == 140
    assert turn_steps([], 7) == 14


def test_nobody_is_timed_for_the_length_of_a_turn_that_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []
    prepared = Prepared(counted.append, None, 0.0, None, None, {}, lambda: None)
    monkeypatch.setattr(
        run, 'make_side', lambda *_: types.SimpleNamespace(prepare=lambda direction: prepared)
    )
    monkeypatch.setattr(run, 'measure_rates', lambda precision: Rates(1e12, 1e12))
    source = synthetic_source(tiny_config())
    assert len(list(run.run(plan(directions=['step'], steps=3), source, ''))) == 1
    assert counted == [3, 3]  # two rounds


def test_no_garbage_is_collected_in_a_turn() -> None:
    """Older objects are frozen during a turn, and returned to the collector at its end."""
    kept, counted = [[] for _ in range(1000)], []
    interleave({'a': lambda steps: counted.append(gc.get_freeze_count())}, rounds=1, steps=1)
    assert counted[0] >= len(kept)
    assert gc.get_freeze_count() == 0


def test_a_side_that_fails_ends_alone() -> None:
    def fail(steps: int) -> None:
        raise ValueError('broken')

    times = interleave({'a': fail, 'b': lambda steps: None}, rounds=2, steps=1)
    assert isinstance(times['a'], ValueError)
    assert len(times['b']) == 2  # type: ignore[arg-type]


def test_rows_are_appended_and_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / 'new' / 'rows.jsonl'
    rows.append(path, {'a': 1})
    rows.append(path, rows.provenance())
    first, second = rows.read(path)
    assert first == {'a': 1}
    assert second['versions']['jax'] == jax.__version__
    with pytest.raises(ValueError, match='JSON'):
        rows.append(path, {'a': float('nan')})
    assert len(rows.read(path)) == 2
    path.write_text('{"a": 1}\n[1]\n')
    with pytest.raises(UserError, match='line 2: expected a JSON object'):
        rows.read(path)
    with pytest.raises(UserError, match='missing'):
        rows.read(tmp_path / 'missing')


def test_table_shows_the_latest_row_of_a_case() -> None:
    row = {name: None for name in FIELDS | MEASURED} | {
        'kind': 'benchmark',
        'versions': {'jax': '1'},
        'precision': 'float32',
        'config': 'x',
        'steps_per_call': 1,
    }
    row |= {
        'device': 'GPU',
        'driver': '5',
        'batch_size': 8,
        'direction': 'step',
        'backend': 'xla',
        'git': 'abc',
        'quartiles_ms': [1, 3],
    }
    row |= {
        'median_ms': 2.0,
        'images_per_second': 4000.0,
        'mfu': 0.5,
        'compile_s': 3.0,
        'matmul_flops': 1e12,
        'copy_bytes_per_s': 1e12,
    }
    text = table.markdown(
        [
            row,
            {'kind': 'sweep'},
            row | {'median_ms': 1.5, 'bytes_moved': 1, 'bandwidth_share': 0.25, 'ratio': 0.75},
        ]
    )
    assert text.splitlines()[0].startswith(
        'GPU; jax 1; driver 5; commit abc. Measured rates of the device: float32 matrix product '
        '1 TFLOP/s'
    )
    assert (
        text.splitlines()[-1]
        == '| x | float32, 8 | step | xla | 1.5 (1 to 3) | 0.75 | 4,000 | 50.0% | 25% | – | 3.0 |'
    )
    several = [
        {'steps_per_call': 1},
        {'steps_per_call': 20},
        {'steps_per_call': 20, 'concurrent_kernels': True},
    ]
    lines = table.markdown([row | changes for changes in several]).splitlines()[-3:]
    assert [line.split(' | ')[2] for line in lines] == [
        'step',
        'step, 20 per call',
        'step, 20 per call, concurrent kernels',
    ]
    caption = table.markdown([row, row | {'batch_size': 4, 'matmul_flops': 2e12}]).splitlines()[0]
    assert caption.endswith('float32 matrix product 1 to 2 TFLOP/s; copy 1000 GB/s.')
    with pytest.raises(UserError, match='no benchmark rows'):
        table.markdown([{'kind': 'sweep'}])
    with pytest.raises(UserError, match='expected a field git'):
        table.markdown([{name: value for name, value in row.items() if name != 'git'}])


def test_a_table_of_several_runs_tells_them_apart() -> None:
    """The sides of a case stand together, each with its commit, as its ratio is to another side of
    that commit.
    """
    row = {name: None for name in FIELDS | MEASURED} | {
        'kind': 'benchmark',
        'versions': {},
        'precision': 'float32',
        'config': 'x',
    }
    row |= {'steps_per_call': 1}
    row |= {
        'device': 'GPU',
        'direction': 'step',
        'quartiles_ms': [1, 3],
        'median_ms': 2.0,
        'images_per_second': 4.0,
        'mfu': 0.5,
    }
    row |= {'compile_s': 3.0, 'matmul_flops': 1e12, 'copy_bytes_per_s': 1e12}
    cases = [
        (8, 'xla', 'old'),
        (9, 'xla', 'old'),
        (8, 'cuda', 'new'),
        (8, 'xla', 'new'),
        (9, 'broken', 'new'),
    ]
    found = [row | {'batch_size': size, 'backend': side, 'git': git} for size, side, git in cases]
    found[-1]['error'] = 'gone'
    lines = table.markdown(found).splitlines()[4:]
    cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    assert [(c[1], c[3], c[-1]) for c in cells] == [
        ('float32, 8', 'xla', 'new'),
        ('float32, 8', 'cuda', 'new'),
        ('float32, 9', 'xla', 'old'),
        ('float32, 9', 'broken', 'new'),
    ]
    assert {len(c) for c in cells} == {12}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ('function', 'arguments', 'expected'),
    [
        (lambda x: jnp.sin(x) + x, [f32(1000)], 8000),
        (lambda x, y: x @ y, [f32(100, 200), f32(200, 50)], 4 * (100 * 200 + 200 * 50 + 100 * 50)),
        (
            lambda x, i: x[i] * 2,
            [f32(100_000, 8), jax.ShapeDtypeStruct((4,), jnp.int32)],
            2 * 4 * 8 * 4 + 16,
        ),  # not the whole table
    ],
)
def test_bytes_moved(
    function: Callable[..., jax.Array], arguments: list[jax.ShapeDtypeStruct], expected: int
) -> None:
    assert bytes_moved(jax.jit(function).lower(*arguments).compile().as_text()) == expected


LOOP = """HloModule m
%body (p: (s32[], bf16[1000])) -> (s32[], bf16[1000]) {
  %p = (s32[], bf16[1000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[1000]{0} get-tuple-element(%p), index=1
  %y = bf16[1000]{0} custom-call(%x), custom_call_target="kernel", api_version=API_VERSION_TYPED_FFI
  ROOT %t = (s32[], /*index=1*/bf16[1000]{0}) tuple(%i, %y)
}
%cond (p: (s32[], bf16[1000])) -> pred[] {
  %p = (s32[], bf16[1000]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}
%update (a: f32[100], b: f32[10], i: s32[]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[100]{0} dynamic-update-slice(%a, %b, %i)
}
%inner (a: f32[100], b: f32[10], i: s32[]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[100]{0} fusion(%a, %b, %i), kind=kLoop, calls=%update
}
ENTRY %main (t: (s32[], bf16[1000]), a: f32[100], b: f32[10], i: s32[]) -> f32[100] {
  %t = (s32[], bf16[1000]{0}) parameter(0)
  %a = f32[100]{0} parameter(1)
  %b = f32[10]{0} parameter(2)
  %i = s32[] parameter(3)
  %w = (s32[], bf16[1000]{0}) while(%t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
  %g = (f32[10]{0}, u8[999999]{0}) custom-call(%b, %b), custom_call_target="__cublas$gemm"
  ROOT %r = f32[100]{0} call(%a, %b, %i), to_apply=%inner
}
"""


def test_bytes_moved_by_loops_calls_and_custom_kernels() -> None:
    """Seven times a kernel of 2000 bytes in and out; a library call without its scratch space; an
    update in place of 40 bytes.
    """
    assert bytes_moved(LOOP) == 7 * 4000 + 3 * 40 + (2 * 40 + 4)
    with pytest.raises(ValueError, match='ENTRY'):
        bytes_moved('HloModule m')


def test_compile_time_and_memory() -> None:
    def build() -> jax.stages.Compiled:
        return (
            jax.jit(lambda x: jnp.tanh(x * 3) @ x.T, donate_argnums=()).lower(f32(64, 64)).compile()
        )

    compiled, lower_s, compile_s = timed_compile(build)
    assert lower_s > 0
    assert compile_s > 0
    assert peak_bytes(compiled) >= 2 * 64 * 64 * 4


def test_rates_are_those_of_this_device() -> None:
    """Within what any machine that runs these tests could do."""
    rates = measure_rates('float32', side=64, copied=2**16)
    assert 1e6 < rates.matmul_flops < 1e17
    assert 1e6 < rates.copy_bytes < 1e14


# The two sides compute the same: PyTorch's loss and gradients are ours, on our weights and draws.
PEER_CONFIGS = {
    'elephants64': {},
    'cifar10': {
        'time_embedding': 'ddpm', 'conv_resample': True, 'downsample_padding': 'same', 'norm_eps': 1e-6, 'num_heads': 1,  # noqa: E501
        'num_head_channels': 0, 'init': 'ddpm',
    },
    'imagenet64': {'num_classes': 5, 'scale_shift_norm': True, 'resblock_updown': True},
}  # fmt: skip


def peer_config(name: str, prediction: str = 'epsilon', *, learn_sigma: bool = False) -> Config:
    base = {
        'channel_mult': (1, 2),
        'attention_resolutions': (4,),
        'num_classes': 0,
        'label_dropout': 0.0,
        'zero_init': False,
    }
    return tiny_config(
        model=base | PEER_CONFIGS[name],
        diffusion={'objective': prediction, 'learn_sigma': learn_sigma, 'vlb_weight': 0.02},
        data={'batch_size': 4},
    )


@pytest.mark.parametrize(
    ('name', 'prediction', 'learn_sigma'),
    [
        ('elephants64', 'epsilon', False),
        ('cifar10', 'v', False),
        ('imagenet64', 'epsilon', False),
        ('imagenet64', 'x0', True),
    ],
)
def test_peer_computes_the_same(name: str, prediction: str, learn_sigma: bool) -> None:
    torch = pytest.importorskip('torch', reason='PyTorch is not installed')
    from jaxunet.benchmark.torch_side import TorchSide  # noqa: PLC0415
    from jaxunet.weights.guided_diffusion import from_tree  # noqa: PLC0415

    config = peer_config(name, prediction, learn_sigma=learn_sigma)
    state, inputs = fresh_state(config), random_inputs(config)
    inputs['t'] = inputs['t'].at[0].set(0)  # the decoder's term
    if 'labels' in inputs:
        inputs['labels'] = inputs['labels'].at[0].set(-1)
    model = build_unet(config, XLA)
    diffusion = make_diffusion(config.diffusion)
    loss, grads = jax.jit(jax.value_and_grad(lambda p: model_loss(model, diffusion, p, inputs)))(
        state.params
    )
    side = TorchSide(config, 'pytorch-eager', synthetic_source(config), state.params)
    x0, t, noise = (torch.tensor(np.asarray(inputs[key])) for key in ('x0', 't', 'noise'))
    labels = torch.tensor(np.asarray(inputs['labels'])).long() if 'labels' in inputs else None
    found = side.backward(
        (x0.permute(0, 3, 1, 2), t.long(), noise.permute(0, 3, 1, 2), labels)
    ).item()
    np.testing.assert_allclose(found, float(loss), rtol=1e-5)
    expected = from_tree(jax.device_get(grads), config, new_attention_order=False)
    for key, parameter in side.model.named_parameters():
        gradient = parameter.grad.numpy()
        np.testing.assert_allclose(
            gradient, expected[key], atol=2e-4 * np.abs(expected[key]).max() + 1e-6, err_msg=key
        )


def test_peer_drops_what_we_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both networks with the same factors by channel in place of the random ones."""
    torch = pytest.importorskip('torch', reason='PyTorch is not installed')
    from jaxunet.benchmark.torch_side import TorchSide  # noqa: PLC0415

    class Factors(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.arange(x.shape[1])[:, None, None]

    monkeypatch.setattr(
        blocks,
        'dropout',
        lambda x, *_: x * jnp.arange(x.shape[-1], dtype=x.dtype).reshape(1, 1, 1, -1),
    )
    config = peer_config('imagenet64', learn_sigma=True).replace(model={'dropout': 0.1})
    state, inputs = fresh_state(config), random_inputs(config)
    model, diffusion = build_unet(config, XLA), make_diffusion(config.diffusion)
    loss = jax.jit(lambda p: model_loss(model, diffusion, p, inputs))(state.params)
    side = TorchSide(config, 'pytorch-eager', synthetic_source(config), state.params)
    places = [n for n, m in side.model.named_modules() if isinstance(m, torch.nn.Dropout)]
    assert places
    for name in places:
        side.model.set_submodule(name, Factors())
    x0, t, noise, labels = (
        torch.tensor(np.asarray(inputs[key])) for key in ('x0', 't', 'noise', 'labels')
    )
    found = side.loss(x0.permute(0, 3, 1, 2), t.long(), noise.permute(0, 3, 1, 2), labels.long())
    np.testing.assert_allclose(found.item(), float(loss), rtol=1e-5)


def test_peer_trains_what_we_train() -> None:
    """A whole step of each: dropout, clipping, AdamW and the average."""
    torch = pytest.importorskip('torch', reason='PyTorch is not installed')
    from jaxunet.benchmark.torch_side import TorchSide  # noqa: PLC0415

    config = tiny_config(
        model={'dropout': 0.5, 'zero_init': False},
        ema={'rates': (0.5, 0.9)},
        data={'augment': 'flip'},
        precision='bfloat16',
    )
    side = TorchSide(config, 'pytorch-eager', synthetic_source(config), fresh_state(config).params)
    before = [p.detach().clone() for p in side.parameters]
    assert np.isfinite(side.step().item())
    norm = torch.nn.utils.get_total_norm([p.grad for p in side.parameters])
    assert norm.item() <= config.optimizer.clip_norm * 1.001
    moved = [p.detach() - old for p, old in zip(side.parameters, before, strict=True)]
    assert max(m.abs().max().item() for m in moved) <= config.optimizer.learning_rate * 1.001
    assert all(m.abs().max().item() > 0 for m in moved if m.ndim == 4)
    for rate, average in zip(config.ema.rates, side.averages, strict=True):
        for a, m, old in zip(average, moved, before, strict=True):
            torch.testing.assert_close(a, old + (1 - rate) * m)
    inputs = side.draw()
    assert len({side.loss(*inputs).item() for _ in range(3)}) > 1  # dropout draws anew


def test_peers_on_the_command_line(tmp_path: pathlib.Path) -> None:
    """On a CPU PyTorch runs as written; the modes that need a GPU are rows that say so."""
    pytest.importorskip('torch', reason='PyTorch is not installed')
    output = tmp_path / 'rows.jsonl'
    options = [
        '--peers=pytorch',
        '--rounds=1',
        '--steps=1',
        '--directions=forward,step',
        '--synthetic',
        f'--output={output}',
    ]
    message = call('jaxunet.benchmark', *flags(), *options, code=1)
    assert 'error: pytorch-best, float32, batch 8, all: needs an NVIDIA GPU' in message
    found = {(row['backend'], row['direction']): row for row in rows.read(output)}
    assert {key for key, row in found.items() if row['error'] is None} == {
        (side, direction) for side in ('auto', 'pytorch-eager') for direction in ('forward', 'step')
    }
    peer = found['pytorch-eager', 'step']
    assert set(peer) == (FIELDS | MEASURED) - {'ops', 'bytes_source', 'peak_source'}
    assert (peer['bytes_moved'], peer['peak_bytes'], peer['lower_s'], peer['reference']) == (
        None,
        None,
        None,
        'auto',
    )
    np.testing.assert_allclose(
        peer['ratio'], peer['median_ms'] / found['auto', 'step']['median_ms']
    )
    assert peer['images'] == 'synthetic images'


def test_peers_refuse_what_they_do_not_train() -> None:
    pytest.importorskip('torch', reason='PyTorch is not installed')
    from jaxunet.benchmark.torch_side import check  # noqa: PLC0415

    for changes, message in (
        ({'precision': 'float16'}, 'precision=float16'),
        ({'diffusion': {'objective': 'flow'}}, 'trains epsilon, x0 and v'),
        ({'data': {'cache': 'stream'}}, 'data.cache=device'),
        ({'model': {'low_res_size': (4,)}}, 'found model.low_res_size'),
    ):
        config = tiny_config(**changes)
        with pytest.raises(UserError, match=message):
            check(config, 'pytorch-eager', synthetic_source(config))


def test_choose_on_a_machine_without_kernels(tmp_path: pathlib.Path) -> None:
    if missing := [name for name in ('pallas', 'cuda') if available(name)]:
        pytest.skip(f'this machine has {missing}')
    path = tmp_path / 'choices.json'
    printed = call(
        'jaxunet.benchmark', *flags(), '--choose', variables={'JAXUNET_CHOICES': str(path)}
    )
    assert printed == 'only xla runs on this machine (cpu): nothing to choose\n'
    assert not path.exists()


@pytest.mark.parametrize('flag', ['--backends=xla', '--directions=step', '--batch_sizes=2,4'])
def test_choose_refuses_what_it_does_not_read(flag: str) -> None:
    error = call('jaxunet.benchmark', *flags(), '--choose', flag, code=2)
    assert error.startswith(f'error: {flag.split("=", maxsplit=1)[0]}: --choose ')


def test_choose_leaves_out_what_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a side that fails while it is timed; what is ready is closed."""
    closed = []

    def fake(name: str, *_: object) -> Side:
        if name == 'missing':
            raise UserError('this machine has no such kernels')

        class Fake:
            def prepare(self, direction: str) -> Prepared:
                def work(steps: int) -> None:
                    if name == 'dies' and steps > 2:
                        raise RuntimeError('out of memory')

                assert direction == 'step'
                return Prepared(work, 0.1, 0.2, 10, 20, {}, lambda: closed.append(name))

        return Fake()

    monkeypatch.setattr(choose, 'make_side', fake)
    monkeypatch.setattr(choose, 'fresh_state', lambda config: None)
    config = plan().config
    measure = choose.step_timer(config, synthetic_source(config), rounds=3, steps=4)
    found = measure(['a', 'missing', 'dies'])
    assert {name: len(times) for name, times in found.items()} == {'a': 3}
    assert closed == ['a', 'dies']
