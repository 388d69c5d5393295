"""`python -m dtrain`: the same as the command `dtrain`, for where the command is not on the path.

It adds nothing of its own.
"""

import sys

from dtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
