"""`python -m outgrow` is the command line."""

import sys

from outgrow.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
