"""`dtrain launch` with a shorter limit of silence: a node is lost after 4 s, not 30, for short tests."""

import sys

from dtrain import cli
from dtrain.launch.hosts import control_plane

LOST, LEASE = 4.0, 3.0

if __name__ == "__main__":
    control_plane.LOST = LOST
    control_plane.ControlClient.lease_left.__defaults__ = (LEASE,)
    sys.exit(cli.main(["launch", *sys.argv[1:]]))
