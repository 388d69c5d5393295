"""The checksum of TFRecord files, from a private module of TensorBoard.

TensorFlow has no Python function for it, and a data reader must count records without importing TensorFlow.
TensorBoard writes its own record files with this function. It is no `Reach`, since the versions on record are
those of Keras and TensorFlow.
"""

from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

__all__ = ["masked_crc32c"]
