"""A key-value store for signed values, kept in TensorFlow's coordination service.

The service accepts values from anyone who can reach the first worker's port. So a value counts only if a
worker of this start of the job signed it for this key; any other value raises an error. What values mean is
not decided here.
"""

from __future__ import annotations

import contextlib

from dtrain.cluster.secret import SIZE, Secret
from dtrain.errors import AuthenticationError
from dtrain.upstream import tensorflow as upstream_tf

HINT = (
    "Another user or machine can reach the first worker's port, or the workers have not the same "
    "DTRAIN_SECRET_FILE; see docs/security.md."
)


class SignedStore:
    """Publishes and reads values.

    Args:
        secret: the secret of this start of the job; None if the workers share none, and values are not
            signed.
    """

    def __init__(self, secret: Secret | None) -> None:
        self.secret = secret

    def put(self, topic: str, number: int, worker: int, body: str) -> None:
        """Publishes a value.

        Args:
            topic: the topic of the value.
            number: the number of the value, among this worker's values of the topic.
            worker: this worker's number.
            body: the value, in ASCII.

        Raises:
            AuthenticationError: another value is published at this key already.
        """
        import tensorflow as tf

        key, text = self._key(topic, number, worker), self._signature(topic, number, worker, body) + body
        try:
            upstream_tf.set_shared(key, text)
        except tf.errors.AlreadyExistsError:
            # An equal value is this worker's own: the first request arrived, and only its answer was lost.
            if upstream_tf.get_shared(key, 1000) != text:
                raise _forged(topic, worker) from None

    def get(self, topic: str, number: int, worker: int, milliseconds: int) -> str | None:
        """A worker's value; None if the worker publishes none within `milliseconds`.

        Raises:
            AuthenticationError: no worker of this job has signed the value for this key.
        """
        import tensorflow as tf

        try:
            text = upstream_tf.get_shared(self._key(topic, number, worker), max(1, milliseconds))
        except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
            return None
        if self.secret is None:
            return text
        signature, body = text[: 2 * SIZE], text[2 * SIZE :]
        if not self.secret.has_signed(_bytes(signature), "value", topic, number, worker, body):
            raise _forged(topic, worker)
        return body

    def remove(self, topic: str, number: int, worker: int) -> None:
        """Deletes a value that no worker will read any more."""
        import tensorflow as tf

        with contextlib.suppress(tf.errors.OpError):  # a service that has stopped keeps no values
            upstream_tf.delete_shared(self._key(topic, number, worker))

    def _key(self, topic: str, number: int, worker: int) -> str:
        """The key of a value; without the secret, the keys of later values cannot be guessed."""
        if self.secret is None:
            return f"dtrain/{topic}/{number}/{worker}"
        return f"dtrain/{topic}/{self.secret.sign('key', topic, number, worker).hex()[:32]}"

    def _signature(self, topic: str, number: int, worker: int, body: str) -> str:
        return "" if self.secret is None else self.secret.sign("value", topic, number, worker, body).hex()


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _forged(topic: str, worker: int) -> AuthenticationError:
    return AuthenticationError(
        f"At the place of a value of worker {worker} ({topic}) is one that this worker has not signed. It is "
        "not used.",
        hint=HINT,
    )
