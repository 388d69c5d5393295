"""Downloads the archive of a published data set, once, and only if the user asked for it.

It checks the file's SHA-256 sum before it moves the file to its place, so that no partial file is ever read.
It does not look for archives that are there already; `published.py` does that.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from dtrain.errors import DataError

_ANSWER_SECONDS = 15.0
_SILENCE_SECONDS = 60.0  # seconds without a received byte after which the download fails
_HEAD_REFUSED = (403, 405, 501)  # the statuses of servers that refuse HEAD requests, but may serve the file


def download(title: str, url: str, sha256: str, target: Path) -> None:
    """Downloads a file by `keras.utils.get_file`, and moves it to `target` when its sum is right.

    Args:
        title: the data set's name in messages.
        url: the address of the file.
        sha256: its SHA-256 sum, in lower-case hexadecimal digits.
        target: where to put it; missing folders are made.

    Raises:
        DataError: the server does not answer within 15 seconds, the file has another sum, or it cannot be
            written. Nothing is left at `target`.
    """
    elsewhere = f"download {url} on another machine and put it at {target.absolute()}"
    reason = _unreachable(url)
    if reason:
        raise DataError(
            f"{title} cannot be downloaded from {url}: {reason}.",
            hint=f"If this machine has no network, {elsewhere}. A proxy is read from https_proxy.",
        )
    import keras

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as folder, _silence_ends():
            downloaded = keras.utils.get_file(
                target.name, url, cache_dir=folder, file_hash=sha256, hash_algorithm="sha256"
            )
            Path(downloaded).replace(target)
    except ValueError as error:  # get_file's, for another sum
        raise DataError(
            f"The file at {url} is not the published one of {title}: its SHA-256 sum is not {sha256}.",
            hint=f"Try again later, or {elsewhere}.",
        ) from error
    except Exception as error:  # get_file wraps what the connection raised in a plain Exception
        raise DataError(
            f"The download of {title} from {url} broke off: {error}.", hint=f"Try again, or {elsewhere}."
        ) from error


def _unreachable(url: str) -> str:
    """Why the server does not serve the file, or a name server does not answer; "" if the server answers."""
    answers: list[str] = []

    def ask() -> None:
        try:
            head = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(head, timeout=_ANSWER_SECONDS):
                answers.append("")
        except urllib.error.HTTPError as error:
            answers.append("" if error.code in _HEAD_REFUSED else f"the server answers {error}")
        except urllib.error.URLError as error:
            answers.append(str(error.reason))
        except (OSError, http.client.HTTPException) as error:
            answers.append(str(error) or type(error).__name__)

    # In a thread, because a name lookup cannot be given a time limit.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    return answers[0] if answers else f"no answer within {_ANSWER_SECONDS:g} seconds"


@contextlib.contextmanager
def _silence_ends() -> Iterator[None]:
    """Ends a connection over which no data arrives; `get_file` sets no time limit of its own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SILENCE_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
