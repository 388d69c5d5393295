"""The digits: shapes, range, a split that never changes, and a clear error where they are missing."""

import sys

import numpy as np
import pytest

from dtrain.data import load_digits
from dtrain.errors import DataError, DtrainError


def test_shapes_types_and_range():
    digits = load_digits()
    assert [len(part.labels) for part in digits] == [1257, 180, 360]
    for images, labels in digits:
        assert images.shape == (len(labels), 8, 8, 1)
        assert images.dtype == np.float32
        assert images.min() == 0.0
        assert images.max() == 1.0
        assert labels.dtype == np.int64
        assert set(labels) == set(range(10))


def test_split_is_the_same_every_time_and_another_with_another_seed():
    first, second, other = load_digits(), load_digits(), load_digits(split_seed=1)
    for part in range(3):
        np.testing.assert_array_equal(first[part].images, second[part].images)
        np.testing.assert_array_equal(first[part].labels, second[part].labels)
    assert not np.array_equal(first.test.images, other.test.images)


def test_parts_together_are_the_whole_data():
    from sklearn.datasets import load_digits as source

    parts = np.concatenate([part.images for part in load_digits()]).reshape(-1, 64) * 16
    whole = source().data
    np.testing.assert_array_equal(parts[np.lexsort(parts.T)], whole[np.lexsort(whole.T)])


def test_every_digit_has_the_same_share_in_all_parts():
    digits = load_digits()
    whole = np.bincount(np.concatenate([part.labels for part in digits])) / 1797
    for part in digits:
        np.testing.assert_allclose(np.bincount(part.labels) / len(part.labels), whole, atol=0.01)


def test_images_show_their_digit():
    # A zero has a hole in the middle and a one has none: images and labels are in the same order.
    images, labels = load_digits().train
    middle = images[:, 3:5, 3:5, 0].mean(axis=(1, 2))
    assert middle[labels == 0].mean() < 0.3 < 0.6 < middle[labels == 1].mean()


@pytest.mark.parametrize("sizes", [{"test": 5}, {"validation": 0}, {"test": 1700, "validation": 95}])
def test_a_part_that_cannot_hold_all_digits(sizes):
    with pytest.raises(DataError, match="at least 10 images"):
        load_digits(**sizes)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn") as caught:
        load_digits()
    assert isinstance(caught.value, DtrainError)
