"""``python -m weft ARG...``: becomes the program ``weft``, which gets all arguments."""

from __future__ import annotations

import os
import sys

import weft


def main() -> None:
    """Takes the place of this process: signals and the exit status are the program's."""
    path = weft.program()
    if sys.prefix != sys.base_prefix:
        # what `verbs -- pytest` names is this environment's, whether or not somebody activated it
        here = os.path.join(sys.prefix, "bin")
        folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
        if here not in folders:
            os.environ["PATH"] = os.pathsep.join([here, *folders])
    try:
        os.execv(path, [path, *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"weft: cannot run {path}: {error.strerror}")


if __name__ == "__main__":
    main()
