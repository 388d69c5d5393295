"""The digits: shapes, range, a split that never changes, and all of it without scikit-learn."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from dtrain.data import load_digits
from dtrain.errors import ConfigurationError, DataError
from refusals import refused


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


@pytest.mark.parametrize(
    ("sizes", "digest"),
    [
        ({}, "211e908cf345a459"),
        ({"split_seed": 7}, "91c9402a0d6edab1"),
        ({"validation": 10, "test": 10, "split_seed": 3}, "3717e2e9bbab2d84"),
        ({"validation": 333, "test": 1000, "split_seed": 123456}, "b1328628c70feec1"),
    ],
)
def test_the_bits_are_those_of_scikit_learns_split(sizes, digest):
    # Written by scikit-learn 1.9.1: load_digits, then train_test_split(stratify=labels) twice.
    found = hashlib.sha256()
    for images, labels in load_digits(**sizes):
        found.update(images.tobytes())
        found.update(labels.tobytes())
    assert found.hexdigest()[:16] == digest


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
    with refused(DataError, "1797 digits", "10 images", **sizes):
        load_digits(**sizes)


@pytest.mark.parametrize("numbers", [{"split_seed": -1}, {"split_seed": 2**32}, {"test": 360.0}])
def test_numbers_that_split_nothing(numbers):
    with refused(ConfigurationError, **numbers):
        load_digits(**numbers)


def test_nothing_of_scikit_learn_is_needed():
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('scipy', 'sklearn'))); "
        "from dtrain.data import load_digits; print(sum(len(part.labels) for part in load_digits()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1797\n", done.stderr
