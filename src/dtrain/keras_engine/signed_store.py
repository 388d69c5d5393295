"""TensorFlow's coordination service as a place for signed values, each at its own key and nowhere else.

The service takes what anyone sends who reaches the first worker's port. What was not signed by a worker of
this start of the job, for this very key, is an error and never a value.
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
    """Puts values there and gets them.

    Args:
        secret: of this start of the job; None where its workers share none. Then values are not signed.
    """

    def __init__(self, secret: Secret | None) -> None:
        self.secret = secret

    def put(self, topic: str, number: int, worker: int, body: str) -> None:
        """Publishes a value.

        Args:
            topic: what it is about.
            number: which of a worker's values of this topic it is.
            worker: this one's number.
            body: the value, in ASCII.

        Raises:
            AuthenticationError: there is another one already.
        """
        import tensorflow as tf

        key, text = self._key(topic, number, worker), self._signature(topic, number, worker, body) + body
        try:
            upstream_tf.set_shared(key, text)
        except tf.errors.AlreadyExistsError:
            if upstream_tf.get_shared(key, 1000) != text:  # the same one: only the answer was lost
                raise _forged(topic, worker) from None

    def get(self, topic: str, number: int, worker: int, milliseconds: int) -> str | None:
        """The value of a worker; None if it has published none within this time.

        Raises:
            AuthenticationError: what is there was not signed by a worker for this place.
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
        """Deletes a value that nobody will ask for any more."""
        import tensorflow as tf

        with contextlib.suppress(tf.errors.OpError):  # a service that is gone keeps nothing
            upstream_tf.delete_shared(self._key(topic, number, worker))

    def _key(self, topic: str, number: int, worker: int) -> str:
        """The value's place; a stranger does not find out where the next one will be."""
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
