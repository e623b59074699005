"""Linear algebra of the Gaussian process against numpy's general solver."""

from __future__ import annotations

import numpy as np
import pytest

from flopcast.roofline.gpu.profile.gaussian_process import lower_inverse, solve_positive


@pytest.mark.parametrize("size", [1, 2, 128, 129, 301])
def test_a_positive_definite_matrix_is_solved_as_by_a_general_solver(size: int) -> None:
    random = np.random.default_rng(size)
    factor = np.tril(random.normal(size=(size, size))) + size * np.eye(size)
    matrix, right = factor @ factor.T, random.normal(size=size)
    np.testing.assert_allclose(solve_positive(matrix, right), np.linalg.solve(matrix, right), rtol=1e-9)
    np.testing.assert_allclose(lower_inverse(factor) @ factor, np.eye(size), atol=1e-9)


def test_a_matrix_that_is_not_positive_definite_is_refused() -> None:
    with pytest.raises(np.linalg.LinAlgError):
        solve_positive(np.ones((2, 2)) - 2 * np.eye(2), np.ones(2))
