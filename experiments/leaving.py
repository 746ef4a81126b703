"""What Ctrl-C does to a command. Nothing slow is imported here, so that it can be set before anything else is."""

from __future__ import annotations

import sys
from typing import Any


def leave(number: int, frame: Any) -> None:
    print("stopped at once; what was written before is kept, and the same command goes on from there", file=sys.stderr)
    sys.exit(130)
