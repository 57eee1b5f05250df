"""Intervals and paired tests, against values worked out by hand."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.stats import norm

from compressor.statistics import mcnemar, paired, wilson


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


def test_paired_compares_answers_and_right_answers():
    label_N = np.array([0, 1, 1, 0])
    first = np.array([[2, 1], [0, 1], [3, 0], [0, 1]], dtype=np.float32)  # answers 0 1 0 1: right, right, wrong, wrong
    second = np.array([[2, 1], [1, 0], [0, 3], [0, 1]], dtype=np.float32)  # answers 0 0 1 1: right, wrong, right, wrong
    assert paired(first, second, label_N) == {
        "agreement": 0.5,
        "only_first_right": 1,
        "only_second_right": 1,
        "p_value": 1.0,
    }
