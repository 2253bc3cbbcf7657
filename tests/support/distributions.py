"""Statistical tests of drawn timesteps."""

import numpy as np
from scipy import stats


def assert_distribution(t, p):
    """Chi-square on fixed seeds: a wrong distribution is far beyond one in a thousand at 20,000
    draws.
    """
    observed = np.bincount(t, minlength=len(p))
    assert observed[p == 0].sum() == 0
    assert stats.chisquare(observed[p > 0], len(t) * p[p > 0] / p.sum()).pvalue > 1e-3
