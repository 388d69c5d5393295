"""`--download`: from a real server, in place only if the sum is right; an error without a network."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import small_archives
from dtrain.data.published import PublishedArchive, locate
from dtrain.errors import DataError
from refusals import refused

Server = http.server.ThreadingHTTPServer


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Serves a small archive of CIFAR-10 in the folder `served`."""
    (tmp_path / "served").mkdir()
    small_archives.write_cifar10(tmp_path / "served")
    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    with Server(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def published(server: Server, content: bytes) -> PublishedArchive:
    name = "cifar-10-python.tar.gz"
    url = f"http://127.0.0.1:{server.server_address[1]}/{name}"
    digest = hashlib.sha256(content).hexdigest()
    return PublishedArchive(title="CIFAR-10", name=name, url=url, size=len(content), sha256=digest)


def test_an_archive_is_downloaded_once_and_compared(server: Server, tmp_path: Path) -> None:
    served = tmp_path / "served" / "cifar-10-python.tar.gz"
    archive, folder = published(server, served.read_bytes()), tmp_path / "new" / "data"
    with refused(DataError, "was not found", "--download"):
        locate(archive, folder, None)
    found = locate(archive, folder, None, may_download=True)
    assert found == folder / "cifar-10-python.tar.gz"
    assert found.read_bytes() == served.read_bytes()
    assert [path.name for path in folder.iterdir()] == [found.name]
    found.write_bytes(b"x" * archive.size)
    with refused(DataError, "has the SHA-256 sum", "download it again"):
        locate(archive, folder, None)
    found.write_bytes(served.read_bytes())
    served.unlink()  # what is there is not downloaded again
    assert locate(archive, folder, None, may_download=True) == found


def test_a_file_of_another_sum_is_refused_and_not_kept(server: Server, tmp_path: Path) -> None:
    with refused(DataError, "is not the published one", "another machine"):
        locate(published(server, b"another"), tmp_path / "data", None, may_download=True)
    assert not list((tmp_path / "data").iterdir())


def test_what_the_server_answers_is_said(server: Server, tmp_path: Path) -> None:
    (tmp_path / "served" / "cifar-10-python.tar.gz").unlink()
    with refused(DataError, "404", "another machine"):
        locate(published(server, b""), tmp_path / "data", None, may_download=True)


@pytest.mark.parametrize("recipe", ["cifar10", "imdb"])
def test_a_recipe_without_a_network_says_so(recipe: str, tmp_path: Path) -> None:
    """A proxy that nobody serves stands for a machine without a network, also where there is one."""
    environment = os.environ | {"https_proxy": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "dtrain", "train", recipe, "--download", "--strategy", "multi_worker"],
        cwd=tmp_path,
        env=environment,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "cannot be downloaded from https://" in done.stderr
    assert "has no network" in done.stderr
    assert not (tmp_path / "runs").exists()
