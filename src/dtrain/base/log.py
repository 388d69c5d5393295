"""dtrain's only logger. It has no handler: the application decides where log lines go."""

from __future__ import annotations

import logging

logger = logging.getLogger("dtrain")
