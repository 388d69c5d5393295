"""Writes small generated data sets in the published formats, for tests that read them or train on them."""

from __future__ import annotations

import csv
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np

GOOD = ("moving", "brilliant", "fresh", "warm")
BAD = ("dull", "clumsy", "endless", "flat")
PLAIN = ("the", "film", "plot", "actor", "scene", "music", "was", "with", "a", "and")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of ten classes in turn, uint8 of shape (count, 3, 32, 32), and their labels.

    An image is noise, with a brighter patch at a place and in a colour of its class.
    """
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 10
    pixels = random.integers(0, 120, (count, 3, 32, 32))
    for image, label in zip(pixels, labels, strict=True):
        row, column = 8 + 8 * (label // 5), 4 + 5 * (label % 5)
        image[label % 3, row : row + 8, column : column + 5] += 130
    return pixels.astype(np.uint8), labels


def write_cifar10(folder: Path, *, per_batch: int = 40, batches: int = 5) -> Path:
    """Write `cifar-10-python.tar.gz`, with `per_batch` images in each file."""
    path = folder / "cifar-10-python.tar.gz"
    names = [f"data_batch_{number}" for number in range(1, batches + 1)] + ["test_batch"]
    with tarfile.open(path, "w:gz") as archive:
        for seed, name in enumerate(names):
            pixels, labels = images(per_batch, seed)
            rows = pixels.reshape(per_batch, -1)
            batch = {b"data": rows, b"labels": labels.tolist(), b"batch_label": name.encode()}
            _add(archive, f"cifar-10-batches-py/{name}", pickle.dumps(batch, protocol=2))
    return path


def sentences(count: int, seed: int, length: int = 24) -> list[tuple[str, int]]:
    """Texts of neutral words with three positive or three negative ones, and their labels; half of each."""
    random = np.random.default_rng(seed)
    pairs = []
    for number in range(count):
        words = list(random.choice(PLAIN, random.integers(length // 3, length)))
        for _ in range(3):
            words.insert(random.integers(len(words)), str(random.choice(GOOD if number % 2 else BAD)))
        pairs.append((" ".join(words).capitalize() + ".<br />", number % 2))
    return pairs


def write_imdb(folder: Path, *, each: int = 20) -> Path:
    """Write `aclImdb_v1.tar.gz` with `each` positive and `each` negative reviews in each part."""
    path = folder / "aclImdb_v1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for seed, part in enumerate(("train", "test")):
            counts = {"pos": 0, "neg": 0}
            for text, label in sentences(2 * each, seed):
                kind, rating = ("pos", 8) if label else ("neg", 3)
                _add(archive, f"aclImdb/{part}/{kind}/{counts[kind]}_{rating}.txt", text.encode())
                counts[kind] += 1
    return path


def write_csv(folder: Path, *, count: int = 100) -> Path:
    """Write `news.csv` with an index, a title, a text with a line break, and a label, separated by `;`."""
    path = folder / "news.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["", "title", "text", "label"])
        for number, (text, label) in enumerate(sentences(count, seed=5)):
            title, _, rest = text.partition(" ")
            writer.writerow([number, title, rest.replace(" the ", " the\n", 1), label])
    return path
