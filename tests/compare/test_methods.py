"""Methods of `jaxunet.compare`: names, fields, and numbers by method."""

from __future__ import annotations

import pytest
from support.tiny import tiny_config

from jaxunet.compare.jobs import base_config
from jaxunet.compare.methods import METHODS, Method, numbers_by_method, parse_methods
from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.samplers import evaluation_sampler
from jaxunet.runtime.errors import UserError


def test_all_methods_have_one_sampler():
    """Whatever their objectives: DDIM, or that of the config."""
    base = base_config(Config())
    for method in parse_methods(['uniform', 'flow', 'v_cosine']):
        assert evaluation_sampler(method.apply(base)) == ('ddim', 50)
    given = tiny_config(evaluation={'sampler': 'heun', 'steps': 9})
    assert evaluation_sampler(base_config(given)) == ('heun', 9)


def test_runs_start_from_random_weights():
    with pytest.raises(UserError, match=r'init_from: expected no weights, .* found model.bin'):
        base_config(tiny_config(init_from='model.bin'))


def test_every_method_fits_every_config():
    for values in (to_dict(Config()), to_dict(tiny_config())):
        for method in parse_methods(list(METHODS)):
            applied = method.apply(resolve(values))
            assert {
                path: getattr(getattr(applied, path.split('.')[0]), path.split('.')[1])
                for path in method.fields
            } == method.fields
    assert parse_methods(['mine:timesteps.sampler=adaptive+timesteps.adaptive_bins=8']) == [
        Method(
            'mine',
            {
                'loss.weighting': 'uniform',
                'timesteps.sampler': 'adaptive',
                'timesteps.adaptive_bins': 8,
            },
        )
    ]


def test_methods_go_together():
    flow = {'diffusion.objective': 'flow', 'diffusion.schedule': 'linear'}
    (found, changed) = parse_methods(['flow+adaptive+min_snr', 'flow+muon:loss.weighting=p2'])
    assert found.fields == {**flow, 'loss.weighting': 'min_snr', 'timesteps.sampler': 'adaptive'}
    assert changed.fields == {
        **flow,
        'optimizer.name': 'muon',
        'loss.weighting': 'p2',
        'timesteps.sampler': 'uniform',
    }
    assert found.apply(Config()).diffusion.objective == 'flow'
    with pytest.raises(UserError, match=r'--methods edm\+policy: .* policy is defined by the'):
        parse_methods(['edm+policy'])[0].apply(Config())


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('min_snt', '\'min_snt\' is not one of uniform, .*did you mean "min_snr"'),
        ('a b:loss.p2_k=1.0', 'expected NAME, NAME.NAME or NAME:field=value'),
        ('p2:p2_k', "NAME:field=value.field=value, found 'p2_k'"),
        ('p2:loss.p2_q=1', r'--methods p2: loss\.p2_q: unknown field'),
        ('p2:loss.p2_k=x', r"--methods p2: loss\.p2_k: expected float, found 'x'"),
        ('p2:train.steps=5', r'train\.steps must be the same for all methods'),
        ('p2:seed=5', 'seed must be the same for all methods'),
        ('flow+', 'expected NAME, '),
        ('flow+muom', '\'muom\' is not one of uniform, .*did you mean "muon"'),
        (
            'min_snr+muon+p2',
            'min_snr and p2 do not go together: loss.weighting is min_snr in one and p2 in the',
        ),
    ],
)
def test_methods_that_are_none(text, message):
    with pytest.raises(UserError, match=message):
        parse_methods(['uniform', text])
    with pytest.raises(UserError, match='uniform is given twice'):
        parse_methods(['uniform', 'uniform'])
    with pytest.raises(
        UserError, match=r'--methods p2: the config is not valid: loss\.p2_k: expected more than 0'
    ):
        Method('p2', {'loss.p2_k': -1.0}).apply(Config())


def test_numbers_by_method():
    assert numbers_by_method('--seeds', ['b=3'], ['a', 'b'], 1) == {'a': 1, 'b': 3}
    assert numbers_by_method('--seeds', ['2', 'b=3'], ['a', 'b'], 1) == {'a': 2, 'b': 3}
    assert numbers_by_method('--seconds', ['b=0.5'], ['a', 'b'], 300.0) == {'a': 300, 'b': 0.5}
    assert numbers_by_method('--seeds', ['b=3', '2'], ['a', 'b'], 1) == {'a': 2, 'b': 3}
    for twice, where in ((['2', '3'], 'all methods, 2 and 3'), (['b=2', '1', 'b=4'], 'b, 2 and 4')):
        with pytest.raises(UserError, match=f'--seeds: there are two numbers for {where}'):
            numbers_by_method('--seeds', twice, ['a', 'b'], 1)
    for wrong in ('0', 'c=1', 'b=', 'x', '1.5'):
        with pytest.raises(UserError, match='--seeds: expected COUNT or NAME=COUNT'):
            numbers_by_method('--seeds', [wrong], ['a', 'b'], 1)
    for wrong in ('0', 'c=1', 'b=', 'x', '-1', 'nan', 'inf'):
        with pytest.raises(
            UserError,
            match='--seconds: expected SECONDS or NAME=SECONDS, with SECONDS above 0 and names of '
            'a, b, found',
        ):
            numbers_by_method('--seconds', [wrong], ['a', 'b'], 1.0)
