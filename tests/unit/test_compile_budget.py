"""When the guard of compile time fails, and when it asks for more rounds."""

from __future__ import annotations

import pytest

from tests.compile_budget import is_worse


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0] * 2, None),
        ([0.9, 1.0, 1.9], False),
        ([1.15] * 3, None),
        ([1.3] * 8, None),
        ([1.15] * 9, False),
        ([1.0] * 4 + [1.3] * 5, True),
        ([1.3] * 4 + [1.0] * 5, False),
    ],
)
def test_a_median_of_rounds_decides(ratios: list[float], expected: bool | None) -> None:
    assert is_worse([0.4 * ratio for ratio in ratios], 0.4) is expected
