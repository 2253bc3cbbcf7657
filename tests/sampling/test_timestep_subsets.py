"""The timesteps that a sampler visits: subsets by spacing, and guided-diffusion's respacing."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from support.diffusion import alphas
from support.samples import sample

from jaxunet.config import DiffusionConfig
from jaxunet.config.samplers import samplers_of
from jaxunet.diffusion import process as d
from jaxunet.runtime.errors import UserError
from jaxunet.sampling import sampler as s
from jaxunet.sampling import solvers, subsets


@pytest.mark.parametrize('kind', subsets.SKIP_SCHEDULES)
def test_subset_properties(kind):
    """They hold for every T up to 60 and every S, and for some larger ones."""
    rng = np.random.default_rng(0)
    large = [
        (int(total), int(steps))
        for total in rng.integers(61, 5000, 50)
        for steps in rng.integers(1, total + 1, 4)
    ]
    for total, steps in [(t, n) for t in range(1, 61) for n in range(1, t + 1)] + large:
        a = np.linspace(0.999, 1e-3, total) if total > 1 else np.array([0.5])
        subset = subsets.timestep_subset(a, steps, kind)
        assert subset.dtype == np.int32
        assert subset.shape == (steps,), (total, steps)
        assert (np.diff(subset) > 0).all(), (total, steps)
        assert subset[-1] == total - 1
        assert subset[0] == (0 if steps > 1 else total - 1)
        if steps > 1 and kind in ('linear', 'quadratic'):
            ideal = np.linspace(0, 1, steps) ** (1 if kind == 'linear' else 2) * (total - 1)
            # Every integer is taken if the ideal is denser than the integers.
            distance = np.abs(subset - np.maximum(ideal, np.arange(steps))).max()
            assert distance <= (0.5 + 1e-9 if kind == 'linear' else 1), (total, steps)


def test_subset_known_values():
    a = alphas()
    np.testing.assert_array_equal(subsets.timestep_subset(a, 4, 'linear'), [0, 333, 666, 999])
    np.testing.assert_array_equal(
        subsets.timestep_subset(a, 5, 'quadratic'), [0, 62, 250, 562, 999]
    )
    np.testing.assert_array_equal(
        subsets.timestep_subset(a[:10], 7, 'quadratic'), [0, 1, 2, 3, 4, 6, 9]
    )


def test_one_step_starts_from_noise_or_from_the_image():
    """`--steps` starts from noise alone, `--respacing` as guided-diffusion does."""
    a = alphas()
    np.testing.assert_array_equal(subsets.timestep_subset(a, 1, 'linear'), [999])
    np.testing.assert_array_equal(subsets.respaced_timesteps(a, '1'), [0])
    for steps in range(2, 1001):
        respaced = subsets.respaced_timesteps(a, str(steps))
        np.testing.assert_array_equal(subsets.timestep_subset(a, steps, 'linear'), respaced)


@pytest.mark.parametrize('schedule', ['linear', 'cosine'])
def test_noise_level_subsets_are_the_nearest_levels(schedule):
    a = alphas(schedule=schedule)
    sigmas = solvers.noise_to_signal(a)
    low, high = (
        sigmas[0],
        {'karras': sigmas[sigmas <= 80][-1], 'log_snr': sigmas[sigmas <= math.exp(5.1)][-1]},
    )
    seventh = low ** (1 / 7) + np.linspace(0, 1, 12) * (high['karras'] ** (1 / 7) - low ** (1 / 7))
    wanted = {
        'karras': seventh**7,
        'log_snr': np.geomspace(low, high['log_snr'], 12),
    }  # EDM eq. 5; Lu et al. section 6
    for kind, levels in wanted.items():
        subset = subsets.timestep_subset(a, 12, kind)
        nearest = np.abs(np.log(sigmas)[None] - np.log(levels)[:, None]).argmin(axis=1)
        # The next levels are taken if several wanted ones fall on a level.
        np.testing.assert_allclose(subset, np.maximum(nearest, np.arange(12)), atol=1)
        assert sigmas[subset[-1]] == high[kind]
        # More steps than there are levels below the highest: then also those above.
        np.testing.assert_array_equal(subsets.timestep_subset(a, 1000, kind), range(1000))


def test_respacing_of_sections():
    """guided-diffusion's space_timesteps, by hand."""
    a = alphas()
    np.testing.assert_array_equal(subsets.respaced_timesteps(a, 'ddim50'), range(0, 1000, 20))
    np.testing.assert_array_equal(subsets.respaced_timesteps(a, 'ddim250'), range(0, 1000, 4))
    np.testing.assert_array_equal(subsets.respaced_timesteps(a[:10], '2,1,3'), [0, 3, 4, 7, 8, 9])
    subset = subsets.respaced_timesteps(a[:300], '10,15,20')
    assert subset[17] == 149  # seven strides of 99/14 add up to a little less than 49.5
    process = d.make_diffusion(DiffusionConfig(objective='x0', learn_sigma=True))
    for name in samplers_of('x0'):
        sampler = s.make_sampler(s.SamplerConfig(name, respacing='10,20,30'), process)
        assert len(set(sampler.timesteps)) == 60
        images = sample(
            lambda x, t: jnp.full((*x.shape[:3], 2), 0.25),
            s.sample_keys(0, range(1)),
            (4, 4, 1),
            sampler,
        )
        np.testing.assert_allclose(images, 0.25, rtol=1e-6)


@pytest.mark.parametrize(
    ('respacing', 'message'),
    [
        ('ten', r"respacing: expected numbers of steps such as '250' .* found 'ten'"),
        ('10,,3', r"found '10,,3'"),
        ('0', r"found '0'"),
        ('', r"found ''"),
        ('ddim300', r'respacing: no whole stride takes 300 of 1000 steps'),
        ('1001', r'respacing: 1001 steps from a section of 1000'),
        ('400,10,10', r'respacing: 400 steps from a section of 334'),
        ('linear0', r"respacing: expected linearN with N of 1 to 1000, .* found 'linear0'"),
        ('quadratic1001', r'respacing: expected quadraticN with N of 1 to 1000, .* found'),
        ('quadratic', r"respacing: expected numbers of steps such as .* found 'quadratic'"),
    ],
)
def test_wrong_respacing(respacing, message):
    with pytest.raises(UserError, match=message):
        subsets.respaced_timesteps(alphas(), respacing)
