"""What tensorflow-datasets prepared, in two file formats, loads without a download and without devices."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dtrain.data import load_cifar10, load_imdb
from dtrain.errors import DataError, UnsupportedVersionError
from refusals import refused

pytest.importorskip("tensorflow_datasets", reason="needs tensorflow-datasets: pip install 'dtrain[data]'")

# Builders with the names, versions and features of the published ones, and examples of our own.
PREPARE = """
import os, sys, traceback
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

class Tiny(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(self.features()))

    def _split_generators(self, manager):
        return {split: self._generate_examples(split, n) for split, n in self.sizes.items()}

    def _generate_examples(self, split, n):
        for number in range(n):
            yield str(number), self.example(split, number)

class Cifar10(Tiny):
    VERSION = tfds.core.Version("3.0.2")
    sizes = {"train": 30, "test": 8}

    def features(self):
        image, label = tfds.features.Image(shape=(32, 32, 3)), tfds.features.ClassLabel(num_classes=10)
        return {"id": tfds.features.Text(), "image": image, "label": label}

    def example(self, split, number):
        image = np.full((32, 32, 3), 10 * number % 256, np.uint8)
        image[0, 1] = (1, 2, 3)
        return {"id": f"{split}_{number}", "image": image, "label": number % 10}

class ImdbReviews(Tiny):
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="plain_text", version="1.0.0")]
    sizes = {"train": 6, "test": 4, "unsupervised": 2}

    def features(self):
        return {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(names=["neg", "pos"])}

    def example(self, split, number):
        label = -1 if split == "unsupervised" else number % 2
        return {"text": f"{split} {number}: déjà vu", "label": label}

def prepare(root):
    for file_format in ("tfrecord", "array_record"):
        for builder in (Cifar10, ImdbReviews):
            builder(data_dir=f"{root}/{file_format}", file_format=file_format).download_and_prepare()

# Preparing starts TensorFlow's devices, so a process of its own does it; importing TensorFlow takes longest.
root, status = sys.argv[1], 1
if (child := os.fork()) == 0:
    try:
        prepare(root)
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)
assert os.waitpid(child, 0)[1] == 0
"""

# Both formats, and afterwards TensorFlow lets its devices be set, as it does only before anything has run.
LOAD = """
import json
from pathlib import Path
from dtrain.data import load_cifar10, load_imdb
from dtrain.errors import DataError
found = {}
for file_format in ("array_record", "tfrecord"):
    cifar, imdb = load_cifar10(f"{root}/{file_format}"), load_imdb(f"{root}/{file_format}")
    found[file_format] = {
        "pixels": [part.images[:, 5, 5, 2].tolist() for part in cifar],
        "corner": cifar.train.images[3, 0, 1].tolist(),
        "images": [(*map(int, part.images.shape), str(part.images.dtype)) for part in cifar],
        "labels": [part.labels.tolist() for part in (*cifar, *imdb)],
        "types": sorted({str(part.labels.dtype) for part in (*cifar, *imdb)}),
        "texts": [part.texts for part in imdb],
        "first": load_cifar10(f"{root}/{file_format}", limit=4).train.labels.tolist(),
    }
(file,) = Path(root).glob("tfrecord/cifar10/3.0.2/*-train.tfrecord-*")
whole, found["damaged"] = file.read_bytes(), []
for content in (whole[:len(whole) // 2], whole[:100] + b"?" + whole[101:], b""):
    file.write_bytes(content)
    try:
        load_cifar10(f"{root}/tfrecord")
    except DataError as error:
        found["damaged"].append(error.message)
file.write_bytes(whole)
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
found["devices"] = len(tf.config.list_logical_devices("CPU"))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("prepared")
    command = [sys.executable, "-c", PREPARE + LOAD, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture(scope="module")
def root(prepared) -> Path:
    return prepared[0]


def test_both_file_formats_load_and_leave_tensorflow_untouched(prepared):
    done = prepared[1]
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("tfrecord", "array_record"):
        told = found[name]
        assert told["images"] == [[30, 32, 32, 3, "uint8"], [8, 32, 32, 3, "uint8"]]
        assert told["corner"] == [1, 2, 3]
        for pixels, labels, size in zip(told["pixels"], told["labels"], (30, 8), strict=False):
            # Each image was made from its number, so it tells its label.
            numbers = [{10 * n % 256: n for n in range(size)}[pixel] for pixel in pixels]
            assert sorted(numbers) == list(range(size))
            assert labels == [number % 10 for number in numbers]
        for split, texts, labels in zip(("train", "test"), told["texts"], told["labels"][2:], strict=True):
            assert sorted(texts) == [f"{split} {number}: déjà vu" for number in range(len(texts))]
            assert labels == [int(text.split()[1][:-1]) % 2 for text in texts]
        assert told["types"] == ["int64"]
        assert told["first"] == told["labels"][0][:4]
    # The same order from both.
    assert found["tfrecord"]["labels"] == found["array_record"]["labels"]
    assert found["devices"] == 2
    cut, changed, empty = found["damaged"]
    assert "'train' in" in cut
    assert "DataLossError" in cut
    assert "DataLossError" in changed
    assert "should have 30 examples, but 0 could be read" in empty
    assert "deprecated" not in done.stderr
    assert "OpenCV" not in done.stderr


@pytest.mark.parametrize(
    ("load", "inner"),
    [
        (load_cifar10, "cifar10"),
        (load_cifar10, "cifar10/3.0.2"),
        (load_imdb, "imdb_reviews"),
        (load_imdb, "imdb_reviews/plain_text"),
        (load_imdb, "imdb_reviews/plain_text/1.0.0"),
    ],
)
def test_any_folder_of_the_nest_is_taken(root, load, inner):
    whole, found = load(root / "array_record"), load(root / "array_record" / inner)
    np.testing.assert_array_equal(whole.test.labels, found.test.labels)


def test_the_newest_version_is_taken_and_what_was_not_finished_is_not(root, tmp_path):
    shutil.copytree(root / "array_record" / "cifar10" / "3.0.2", tmp_path / "cifar10" / "10.0.0")
    for worse in ("3.0.2", "incomplete.AB_11.0.0"):
        (tmp_path / "cifar10" / worse).mkdir()
        (tmp_path / "cifar10" / worse / "dataset_info.json").write_text("{}")
    assert len(load_cifar10(tmp_path).test.labels) == 8


def test_another_data_set_is_named(root):
    with refused(DataError, "'imdb_reviews'", "'cifar10'"):
        load_cifar10(root / "array_record" / "imdb_reviews" / "plain_text" / "1.0.0")


@pytest.mark.parametrize("damage", ["missing", "cut", "info"])
def test_files_that_are_missing_or_damaged(root, tmp_path, damage):
    folder = tmp_path / "cifar10" / "3.0.2"
    shutil.copytree(root / "array_record" / "cifar10" / "3.0.2", folder)
    (file,) = folder.glob("*-train.array_record-*")
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:
        (folder / "dataset_info.json").write_text("{")
    with refused(DataError, folder, "JSON" if damage == "info" else "'train'"):
        load_cifar10(tmp_path)


def test_without_the_package_the_message_names_it(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with refused(UnsupportedVersionError, "tensorflow-datasets", "pip install 'dtrain[data]'"):
        load_cifar10(root / "tfrecord")
