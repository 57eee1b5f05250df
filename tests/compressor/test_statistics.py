"""Intervals and paired tests, against values worked out by hand."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.stats import norm, wilcoxon

from compressor.statistics import bootstrap, calibration, mcnemar, ratio_of_rounds, share_differences, wilson


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
    factor = np.exp(norm.ppf(0.975) * np.sqrt(17 / (81 * 73)))
    assert found["ratio"] == pytest.approx(80 / 72)
    assert_allclose(found["ratio_95"], (80 / 72 / factor, 80 / 72 * factor), atol=1e-7)


def test_equal_answers_to_few_rows_are_no_certain_ratio():
    found = share_differences(right=20, only_first=0, only_second=0, rows=20)
    assert found["ratio"] == 1
    assert_allclose(found["ratio_95"], (np.exp(-norm.ppf(0.975) / 21), np.exp(norm.ppf(0.975) / 21)), atol=1e-7)
    assert found["difference_95"][0] < 0 < found["difference_95"][1]


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


def sure(*confidences: float) -> np.ndarray:
    """Rows that say label 0 with these probabilities, of 3 labels."""
    return np.array([(first, (1 - first) * 0.7, (1 - first) * 0.3) for first in confidences])


def test_calibration_by_hand():
    # Confidences 0.82, 0.88 (one right) and 0.95, 0.97, 0.99, 0.99 (all right).
    found = calibration(sure(0.82, 0.88, 0.95, 0.97, 0.99, 0.99), np.array([0, 1, 0, 0, 0, 0]))
    assert [(row["low"], row["high"], row["rows"], row["accuracy"]) for row in found["bins"]] == [
        (0.8, 0.9, 2, 0.5),
        (0.9, 1.0, 4, 1.0),
    ]
    assert_allclose([row["confidence"] for row in found["bins"]], (0.85, 0.975))
    assert_allclose(found["bins"][0]["interval_95"], wilson(1, 2))
    # (2 * |0.5 - 0.85| + 4 * |1 - 0.975|) / 6
    assert found["ece"] == pytest.approx(0.8 / 6)
    assert found["rows"] == 6


def test_calibration_puts_a_bound_into_the_bin_below():
    found = calibration(sure(0.5, 0.75, 1.0), np.zeros(3, int), bins=4)["bins"]
    assert [row["high"] for row in found] == [0.5, 0.75, 1]


def test_calibration_of_one_who_is_right_as_often_as_he_says_is_0():
    # 3 of 4 right at confidence 3/4.
    assert calibration(sure(*[0.75] * 4), np.array([0, 0, 0, 1]))["ece"] == pytest.approx(0)


def test_calibration_says_what_chance_does_to_few_rows():
    # One row of confidence 3/4 is 1/4 off when right and 3/4 off when wrong: 3/4 * 1/4 + 1/4 * 3/4 on average.
    assert calibration(sure(0.75), np.array([0]))["ece_by_chance"] == pytest.approx(0.375, abs=0.03)
    assert calibration(sure(*[0.75] * 1000), np.zeros(1000, int))["ece_by_chance"] < 0.02


def test_calibration_of_more_bins_than_rows_still_counts_every_row():
    probability_NC = np.random.default_rng(0).dirichlet((1, 1, 1), size=7)
    found = calibration(probability_NC, np.zeros(7, int), bins=50)
    assert sum(row["rows"] for row in found["bins"]) == 7


@pytest.mark.parametrize("probability_NC", [np.zeros((0, 2)), np.array([[2.0, -3.0]]), sure(0.5, 0.6)])
def test_calibration_refuses_what_are_no_probabilities_of_the_rows(probability_NC):
    with pytest.raises(ValueError, match="sums to 1"):
        calibration(probability_NC, np.zeros(min(1, len(probability_NC)), int))


def test_a_ratio_of_few_rounds_by_hand():
    found = ratio_of_rounds([20.0, 80.0, 40.0], [10.0, 20.0, 10.0])
    # Logs of 2, 4, 4 in units of log 2: 1, 2, 2; of pairs 1, 1.5, 1.5, 2, 2, 2; mean 5/3, deviation sqrt(1/3).
    spread = 4.30265 * np.sqrt(1 / 3) / np.sqrt(3)  # t of 2 degrees of freedom
    assert found["ratio"] == pytest.approx(2**1.75)
    assert_allclose(found["interval_95"], (2 ** (5 / 3 - spread), 2 ** (5 / 3 + spread)), rtol=1e-5)
    assert found["rounds"] == 3


@pytest.mark.parametrize("rounds", [6, 7, 8, 9, 12])
def test_the_interval_of_many_rounds_holds_what_wilcoxon_s_test_does_not_refuse(rounds):
    above = np.random.default_rng(rounds).lognormal(1.0, 0.3, size=rounds)
    found = ratio_of_rounds(above.tolist(), [1.0] * rounds)
    low, high = found["interval_95"]
    assert low < found["ratio"] < high

    def p_value(ratio):
        return wilcoxon(np.log(above) - np.log(ratio), method="exact").pvalue

    assert min(p_value(low * 1.0001), p_value(high / 1.0001)) > 0.05
    assert max(p_value(low / 1.0001), p_value(high * 1.0001)) <= 0.05


def test_two_disturbed_rounds_of_eight_hardly_move_a_ratio():
    quiet = [40.0, 42.0, 44.0, 45.0, 46.0, 50.0]
    assert ratio_of_rounds([*quiet, 310.0, 313.0], [1.0] * 8)["ratio"] == pytest.approx(45, rel=0.12)


def test_a_ratio_turned_round_has_its_interval_turned_round():
    first, second = [3.0, 5.0, 4.0], [1.0, 2.0, 1.5]
    there, back = ratio_of_rounds(first, second), ratio_of_rounds(second, first)
    assert_allclose(back["interval_95"], [1 / end for end in reversed(there["interval_95"])])


def test_one_round_has_no_interval():
    assert ratio_of_rounds([6.0], [3.0]) == {"ratio": pytest.approx(2.0), "interval_95": None, "rounds": 1}
