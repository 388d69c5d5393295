"""`python -m dtrain`: the command `dtrain`, for environments where the command is not in PATH.

It adds nothing to the command.
"""

import sys

from dtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
