"""Intervals and paired tests, against values worked out by hand."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.stats import norm

from compressor.statistics import bootstrap, mcnemar, share_differences, wilson


def rights(*flags: int) -> np.ndarray:
    return np.array(flags, dtype=bool)


@pytest.mark.parametrize(("right", "rows"), [(9, 10), (81, 263), (0, 5), (5, 5), (870, 872)])
def test_wilson_follows_its_formula(right, rows):
    z, share = norm.ppf(0.975), right / rows
    middle = (share + z**2 / (2 * rows)) / (1 + z**2 / rows)
    half = z / (1 + z**2 / rows) * np.sqrt(share * (1 - share) / rows + z**2 / (4 * rows**2))
    assert_allclose(wilson(right, rows), (middle - half, middle + half), atol=1e-12)


def test_wilson_gives_the_textbook_value():
    assert_allclose(wilson(81, 263), (0.2553, 0.3662), atol=1e-4)


def test_wilson_stays_within_0_and_1():
    low, high = wilson(5, 5)
    assert 0 < low < high <= 1


def test_wilson_narrows_with_more_rows():
    assert np.diff(wilson(900, 1000)) < np.diff(wilson(90, 100))


def test_mcnemar_counts_rows_that_only_one_gets_right():
    result = mcnemar(rights(1, 1, 1, 0, 0), rights(1, 0, 0, 1, 0))
    assert (result["only_first_right"], result["only_second_right"]) == (2, 1)


def test_mcnemar_is_the_exact_binomial_test():
    # 1 against 5: two-sided, 2 * (C(6,0) + C(6,1)) / 2**6
    result = mcnemar(rights(1, 0, 0, 0, 0, 0), rights(0, 1, 1, 1, 1, 1))
    assert result["p_value"] == pytest.approx(2 * (1 + 6) / 64)


def test_mcnemar_ignores_rows_that_agree():
    few, many = (rights(1, 0, 0), rights(0, 1, 1)), (rights(1, 0, 0, 1, 0), rights(0, 1, 1, 1, 0))
    assert mcnemar(*few) == mcnemar(*many)


def test_mcnemar_of_equal_answers_has_p_1():
    assert mcnemar(rights(1, 0), rights(1, 0)) == {"only_first_right": 0, "only_second_right": 0, "p_value": 1.0}


def test_mcnemar_s_p_value_does_not_depend_on_the_order():
    first, second = rights(1, 0, 0, 0), rights(0, 1, 1, 1)
    assert mcnemar(first, second)["p_value"] == mcnemar(second, first)["p_value"]


def test_share_differences_by_hand():
    found = share_differences(right=80, only_first=12, only_second=4, rows=100)
    assert found["difference"] == pytest.approx(0.08)
    centre, spread = 8 / 102, norm.ppf(0.975) * np.sqrt(16 + 1 - 64 / 102) / 102
    assert_allclose(found["difference_95"], (centre - spread, centre + spread), atol=1e-7)
    factor = np.exp(norm.ppf(0.975) * np.sqrt(16 / (80 * 72)))
    assert found["ratio"] == pytest.approx(80 / 72)
    assert_allclose(found["ratio_95"], (80 / 72 / factor, 80 / 72 * factor), atol=1e-7)


def test_share_differences_give_no_ratio_to_nothing_right():
    assert "ratio" not in share_differences(right=5, only_first=5, only_second=0, rows=10)


def test_bootstrap_of_a_mean_is_near_the_normal_interval():
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    low, high = bootstrap(lambda rows: float(values[rows].mean()), len(values))
    spread = norm.ppf(0.975) * values.std() / 20
    assert_allclose((low, high), (values.mean() - spread, values.mean() + spread), atol=0.03)


def test_bootstrap_is_the_same_each_time():
    values = np.arange(50.0)
    assert bootstrap(lambda rows: values[rows].max(), 50) == bootstrap(lambda rows: values[rows].max(), 50)
