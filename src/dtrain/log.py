"""The one logger of dtrain. It only logs: where the lines go is the application's choice."""

from __future__ import annotations

import logging

logger = logging.getLogger("dtrain")
