"""Lists the private names of Keras and TensorFlow that dtrain replaces or uses, with reason and thread.

python -m dtrain.upstream            # prints those of the installed versions
python -m dtrain.upstream --check    # compares another version with the record; fails where parameters differ
python -m dtrain.upstream --write    # adds what is installed to the record, for the tests to pass with
"""

from __future__ import annotations

import argparse
import sys

from dtrain.upstream import all_reaches
from dtrain.upstream.reach import Reach, Replaced, SetOnObjects, of_installed
from dtrain.upstream.tested_versions import check, write_record


def main() -> None:
    """Prints the names, checks the installed versions, or writes the record."""
    parser = argparse.ArgumentParser(prog="python -m dtrain.upstream", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare what is installed with the record")
    parser.add_argument("--write", action="store_true", help="add what is installed to the record")
    chosen, reaches = parser.parse_args(), all_reaches()
    if chosen.check or chosen.write:
        (check if chosen.check else write_record)(reaches)
        return
    installed = of_installed(reaches)
    kinds = {
        Replaced: "replaces {} names for the process",
        SetOnObjects: "sets {} names on single models, layers, metrics, optimizers and contexts",
        Reach: "uses {} names",
    }
    for kind, text in kinds.items():
        of_kind = [reach for reach in installed if type(reach) is kind]
        sys.stdout.write(f"dtrain {text.format(len(of_kind))}:\n")
        for reach in of_kind:
            thread = "" if reach.thread == "none" else f" ({reach.thread})"
            sys.stdout.write(f"  {reach.place}\n      {reach.reason}{thread}\n")


if __name__ == "__main__":
    main()
