"""Power-function averages: their exponents, inner products and combinations."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
from methods_golden import UPDATES as UPDATES_THERE
from methods_golden import WIDTHS
from support.peer_values import FIXTURES

from jaxunet.checkpoint.power_average import (
    ROUNDING,
    TOLERANCE,
    Profiles,
    allowed_widths,
    combine,
    exponent,
    inner_products,
)
from jaxunet.config.relations import MAX_WIDTH
from jaxunet.training.ema import power_share

UPDATES = 3200
KEPT = (0.05, 0.10)


@pytest.mark.parametrize('width', [0.01, 0.05, 0.1, 0.2, MAX_WIDTH])
def test_an_exponent_gives_its_width(width: float) -> None:
    g = exponent(width)

    def moment(n: int) -> float:
        return scipy.integrate.quad(lambda u: (g + 1) * u**g * u**n, 0, 1, epsabs=1e-13)[0]

    assert np.sqrt(moment(2) - moment(1) ** 2) == pytest.approx(width, rel=1e-8)


def test_the_exponents_of_the_paper() -> None:
    """Its section 3: widths 0.05 and 0.10 are exponents 16.97 and 6.94."""
    assert exponent(0.05) == pytest.approx(16.97, abs=0.005)
    assert exponent(0.10) == pytest.approx(6.94, abs=0.005)
    for width in (0.0, -0.1, 0.289):
        with pytest.raises(ValueError, match='width'):
            exponent(width)


def test_exponents_and_updates_are_those_of_edm2s_code() -> None:
    golden = np.load(FIXTURES / 'methods_golden.npz')
    np.testing.assert_allclose([exponent(w) for w in WIDTHS], golden['power_exponents'], rtol=1e-12)
    shares = [[power_share(width, jnp.int32(t - 1)) for t in UPDATES_THERE] for width in WIDTHS]
    np.testing.assert_allclose(shares, 1 - golden['power_betas'], rtol=1e-5)


def test_inner_products_are_the_integrals() -> None:
    profiles = Profiles(np.array([3.0, 7.5, 7.5, 1e6]), np.array([0.0, 16.97, 2.5, 97.0]))
    found = inner_products(profiles, profiles)
    pairs = list(zip(*profiles, strict=True))

    def after(u: float, time: float, g: float) -> float:
        return 1 - (u / time) ** (g + 1)

    for i, first in enumerate(pairs):
        for j, second in enumerate(pairs):
            end = min(first[0], second[0])
            wanted, _ = scipy.integrate.quad(
                lambda u, a=first, b=second: after(u, *a) * after(u, *b),
                0, end, epsabs=0, epsrel=1e-12, limit=200,
            )  # fmt: skip
            assert found[i, j] == pytest.approx(wanted, rel=1e-11)


def weights_of(width: float, updates: int) -> np.ndarray:
    """The share of each update's weights in the average, by the recursion that training runs."""
    t = np.arange(1, updates + 1)
    beta = (1 - 1 / t) ** (exponent(width) + 1)
    return (1 - beta) * np.append(np.cumprod(beta[:0:-1])[::-1], 1.0)


@pytest.fixture(scope='module')
def walk() -> np.ndarray:
    """Weights after each update: a random walk from nonzero weights, with noise."""
    draw = np.random.default_rng(0)
    steps = draw.standard_normal((UPDATES, 400)) / np.sqrt(UPDATES)
    start = draw.standard_normal(400)
    return start + steps.cumsum(axis=0) + 0.02 * draw.standard_normal(steps.shape)


def kept_averages(
    walk: np.ndarray, count: int, dtype: str
) -> tuple[Profiles, np.ndarray, np.ndarray]:
    """Averages of two widths at `count` times, and of the last time in float32."""
    times = [UPDATES * (i + 1) // count for i in range(count)]
    rows = [(t, w, dtype) for t in times for w in KEPT] + [(UPDATES, w, 'float32') for w in KEPT]
    values = [(weights_of(w, t) @ walk[:t]).astype(d).astype(np.float64) for t, w, d in rows]
    profiles = Profiles(
        np.array([float(t) for t, _, _ in rows]), np.array([exponent(w) for _, w, _ in rows])
    )
    return profiles, np.array([ROUNDING[d] for _, _, d in rows]), np.stack(values)


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_a_random_walk_is_averaged_as_if_directly(dtype: str, walk: np.ndarray) -> None:
    kept, rounding, values = kept_averages(walk, 32, dtype)
    ((low, high),) = allowed_widths(kept, rounding, UPDATES)
    assert low <= 0.025
    assert high >= 0.26
    widths = [low, 0.03, 0.05, 0.075, 0.15, 0.2, high]
    for width, found in zip(widths, combine(kept, rounding, UPDATES, widths), strict=True):
        direct = weights_of(width, UPDATES) @ walk
        error = np.linalg.norm(found.coefficients @ values - direct) / np.linalg.norm(direct)
        assert found.coefficients.sum() == pytest.approx(1, abs=1e-12)
        assert error <= TOLERANCE
        # The prediction is of a walk alone; here, weights that do not move make up the most.
        assert error <= 1.5 * found.error


def test_predicted_errors_are_those_of_a_random_walk() -> None:
    draw = np.random.default_rng(1)
    walk = draw.standard_normal((UPDATES, 2000)).cumsum(axis=0)
    kept, rounding, values = kept_averages(walk, 8, 'float32')
    for found, width in zip(
        combine(kept, rounding, UPDATES, (0.03, 0.2)), (0.03, 0.2), strict=True
    ):
        direct = weights_of(width, UPDATES) @ walk
        error = np.linalg.norm(found.coefficients @ values - direct) / np.linalg.norm(direct)
        assert error == pytest.approx(found.error, rel=0.1)


def test_a_kept_average_is_taken_as_it_is(walk: np.ndarray) -> None:
    kept, rounding, _ = kept_averages(walk, 8, 'float16')
    (found,) = combine(kept, rounding, UPDATES, [0.05])
    wanted = np.zeros(len(rounding))
    wanted[-2] = 1
    np.testing.assert_allclose(found.coefficients, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ('count', 'low', 'high'),
    [(8, 0.044, 0.143), (16, 0.033, 0.241), (32, 0.024, 0.271), (64, 0.020, 0.286)],
)
def test_the_ranges_in_the_documentation(count: int, low: float, high: float) -> None:
    times = np.repeat(np.arange(1, count + 1) * 40000 // count, 2).astype(np.float64)
    times, exponents = np.append(times, [40000] * 2), np.array([exponent(w) for w in KEPT])
    rounding = np.full(len(times), ROUNDING['float16'])
    rounding[-2:] = ROUNDING['float32']
    kept = Profiles(times, np.tile(exponents, count + 1))
    assert allowed_widths(kept, rounding, 40000) == [(low, high)]


def test_few_snapshots_allow_few_widths(walk: np.ndarray) -> None:
    ranges = [allowed_widths(*kept_averages(walk, n, 'float16')[:2], UPDATES) for n in (1, 8, 16)]
    assert all(any(low <= w <= high for low, high in ranges[0]) for w in KEPT)
    assert not any(low <= 0.075 <= high for low, high in ranges[0])
    assert ranges[2][0][0] < ranges[1][0][0] < 0.05
    assert ranges[2][0][1] > ranges[1][0][1] > 0.10
