"""Other libraries beside the kernels: they compute the same, and a failure harms no other side."""

from __future__ import annotations

import logging

import jax
import pytest
from support.kernel_measurements import ORIGIN, fails, measured, same_times, toy

from jaxunet.benchmark.kernels import adamw, peers, project
from jaxunet.benchmark.kernels import measure as kernels
from jaxunet.benchmark.kernels import table as kernel_table
from jaxunet.ops.adamw.cases import AWKWARD
from jaxunet.ops.linear.projection_cases import Case, Layer
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.measurement import Arrays
from jaxunet.runtime.plugins import load_backend

CUDA = load_backend('cuda')
# Of every op and direction: parts, residuals and shortcuts, shifts per sample, a norm without SiLU.
SMALL = (
    '^(8x8_192to256|4x4_256to256|norm_8x8_192to256|norm_8x8_256to256_res(192|256|256.256)'
    '|8x8_(192|256|256.192|256_plain)|64_tokens_8x32|8x8_256to256(_res)?|three|two_averages)$'
)


@pytest.mark.extension
def test_pytorch_computes_the_same(monkeypatch, caplog) -> None:
    """Values and gradients of every op agree with XLA's, else the side is left out."""
    pytest.importorskip('torch')
    layers = (Layer(8), Layer(12, product=False), Layer(4, biases=1))
    monkeypatch.setattr(project, 'CASES', (Case('three', 16, layers),))
    monkeypatch.setattr(adamw, 'CASES', (AWKWARD[1],))
    wanted = peers.with_pytorch(kernels.select([], ['2'], SMALL, [CUDA]))
    wanted = [m._replace(sides=_without('cuda', m.sides)) for m in wanted]
    found = measured(*wanted, trace=same_times)
    assert [row['error'] for row in found] == [None] * len(found)
    missing = {(row['op'], row['direction']) for row in found if 'us_pytorch' not in row}
    only_ours = ('sum_of_squares', 'pack', 'narrow', 'step_with_copies', 'step_then_narrow')
    assert missing == {('adamw', direction) for direction in only_ours}, caplog.text
    timed = {(row['op'], row['direction']) for row in found if 'us_pytorch' in row}
    both = ('norm_silu_conv3x3', 'group_norm', 'attention', 'linear', 'project')
    assert timed == {('adamw', 'step')} | {
        *((op, d) for op in both for d in ('forward', 'forward+backward')),
        *(
            (op, d)
            for op in ('conv3x3', 'upsample_conv3x3')
            for d in ('forward', 'input_gradient', 'weight_gradient')
        ),
    }


def _without(name, sides):
    return {side: call for side, call in sides.items() if side != name}


def test_images_are_not_copied_to_pytorch() -> None:
    torch = pytest.importorskip('torch')
    from jaxunet.benchmark.kernels import torch_peer  # noqa: PLC0415

    (m,) = kernels.select(['group_norm'], ['2'], '^8x8_192$', [CUDA], ['forward'])
    x = torch.zeros((2, 8, 8, 192), dtype=torch.bfloat16)
    (image,) = torch_peer._converted(m, 'x', (x,))
    assert image.data_ptr() == x.data_ptr()
    assert image.shape == (2, 192, 8, 8)
    assert image.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize('peer', ['cudnn', 'tokamax'])
def test_peers_of_attention_compute_the_same(peer: str, monkeypatch) -> None:
    """On a CPU, JAX's own implementation stands for cuDNN's."""
    if peer == 'tokamax':
        pytest.importorskip('tokamax')
    attend = jax.nn.dot_product_attention
    asked = []

    def on_cpu(*operands, implementation=None):
        asked.append(implementation)
        return attend(*operands, implementation='xla')

    monkeypatch.setattr('sys.argv', ['kernels'])  # tokamax parses it
    monkeypatch.setattr(jax.nn, 'dot_product_attention', on_cpu)
    wanted = kernels.select(['attention'], ['2'], '64_tokens', peers.backends([peer]))
    assert [list(m.sides) for m in wanted] == [['xla', peer]] * 2
    promotion = jax.config.jax_numpy_dtype_promotion
    jax.config.update('jax_numpy_dtype_promotion', 'standard')  # in all threads, as in commands
    try:
        found = measured(*wanted, trace=same_times)
    finally:
        jax.config.update('jax_numpy_dtype_promotion', promotion)
    assert [(row['error'], row[f'us_{peer}']) for row in found] == [(None, 2.0)] * 2
    assert asked == (['cudnn'] * 2 if peer == 'cudnn' else [])


def test_a_peer_that_fails_or_differs_is_left_out(monkeypatch, caplog) -> None:
    def wrong(i: Arrays) -> Arrays:
        return {'y': i['x'][0] * 3, 'sum': i['x'][0].sum(axis=0)}

    m = toy('case')
    sides = {'xla': m.sides['xla'], 'pallas': m.sides['pallas'], 'cudnn': fails, 'tokamax': wrong}

    def lost(programs, **_):
        found = same_times(programs)
        return {name: found[name] for name in programs if not name.endswith('pytorch')}

    monkeypatch.setattr(peers, 'fetched', lambda peer, result: result)
    caplog.set_level(logging.WARNING, logger='absl')
    (row,) = measured(m._replace(sides=sides | {'pytorch': m.sides['xla']}), trace=lost)
    assert row['error'] is None
    assert row['ratio'] == 1.0
    assert {name for name in row if name.startswith('us_') and 'quartiles' not in name} == {
        'us_xla',
        'us_pallas',
    }
    for text in (
        'without cudnn: does not compile',
        'without tokamax: its results differ by 0.5 of the largest number',
        'without pytorch: the trace lost its kernels',
    ):
        assert f'toy forward, case, batch 4: {text}' in caplog.text


@pytest.mark.parametrize('peer', ['pytorch', 'cudnn'])
def test_peers_are_measured_where_no_backend_runs(peer, monkeypatch) -> None:
    """One that fails leaves XLA's time alone."""
    both, alone = toy('both'), toy('alone')
    xla = {'xla': both.sides['xla']}
    if peer == 'pytorch':
        monkeypatch.setattr(
            peers,
            'with_pytorch',
            lambda wanted: [
                m._replace(sides={**m.sides, 'pytorch': m.sides['xla']}) for m in wanted
            ],
        )
        monkeypatch.setattr(peers, 'fetched', lambda peer, result: result)
        wanted = [both._replace(sides=xla)]
    else:
        wanted = [both._replace(sides={**xla, peer: both.sides['xla']}), alone._replace(sides=xla)]
    (m,) = kernels.comparable(wanted, [peer])
    assert list(m.sides) == ['xla', peer]
    found = [ORIGIN | row for row in measured(m, m._replace(case='failed', sides=xla))]
    assert kernel_table.summary(found) == ''
    table = kernel_table.tables(found)
    assert table == kernel_table.beside_peers(found)
    assert '| `toy` | forward | both | 4 | 30.0 | 9.0 | – |' in table
    assert '| `toy` | forward | failed | 4 | 30.0 | – | – |' in table


def test_unknown_and_missing_peers(monkeypatch) -> None:
    with pytest.raises(UserError, match=r'--peers: .*did you mean "pytorch"'):
        peers.backends(['pytorhc'])
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(UserError, match='--peers: tokamax: the package tokamax is not installed'):
        peers.backends(['cudnn', 'tokamax'])


def test_table_beside_peers() -> None:
    common = ORIGIN | {'kind': 'kernel', 'dtype': 'bfloat16', 'direction': 'forward', 'batch': 64}
    ours = {
        **{'us_xla': 30.0, 'us_cuda': 10.0, 'ratio_cuda': 3.0, 'tflops_cuda': 1.0},
        **{'gbps_cuda': 1.0, 'error': None},
    }
    found = [
        common | ours | {'op': 'attention', 'case': 'a', 'us_cudnn': 15.04, 'us_pytorch': 20.0},
        common | ours | {'op': 'adamw', 'case': 'b'},
    ]
    plugin = dict(us_other=5.0, ratio_other=6.0, tflops_other=1.0, gbps_other=1.0)
    assert kernel_table.beside_peers(found).splitlines() == [
        '| op | direction | case | batch | CUDA kernels, µs | XLA, µs | cuDNN, µs | PyTorch, µs | '
        'best other / best backend |',
        '| --- | --- | --- | --- | --- | --- | --- | --- | --- |',
        '| `attention` | forward | a | 64 | 10.0 | 30.0 | 15.0 | 20.0 | 1.50 |',
        '| `adamw` | forward | b | 64 | 10.0 | 30.0 | – | – | 3.00 |',
        '',
        'NVIDIA H200, bfloat16, jax 0.11.2, commit abc1234.',
    ]
    assert 'cudnn' not in kernel_table.tables(found)  # a peer gets no verdict
    head, _, row, *_ = kernel_table.beside_peers([found[1] | plugin]).splitlines()
    assert head.endswith('| XLA, µs | other, µs | best other / best backend |')
    assert row == '| `adamw` | forward | b | 64 | 10.0 | 30.0 | 5.0 | 6.00 |'
