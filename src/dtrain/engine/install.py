"""Installs the engine's replacements in Keras and TensorFlow, once a process, with the first strategy.

Importing dtrain installs nothing. The replacements are called for every model of the process. `Replaced` and
`SetOnObjects` in `upstream/reach.py` say what models under no strategy of dtrain's are given.
"""

from __future__ import annotations

import threading

from dtrain.environments import settings

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Replaces the names listed in `upstream/`; calling it again does nothing.

    Raises:
        UnsupportedVersionError: TensorFlow or Keras has an unsupported version, or has changed a name.
        BackendError: Keras does not run on TensorFlow.
    """
    global _installed
    with _lock:
        if not _installed:
            from dtrain.upstream.versions import check_versions

            check_versions()
            from dtrain.engine.replacements import register
            from dtrain.upstream import all_reaches
            from dtrain.upstream.reach import replace_all
            from dtrain.upstream.tested_versions import check

            register()
            reaches = all_reaches()
            replace_all(reaches, unproven=check(reaches))
            if settings.log_device_placement():
                import tensorflow as tf

                tf.debugging.set_log_device_placement(True)
            _installed = True
