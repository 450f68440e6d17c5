"""Makes `python -m wsync` the `wsync` command."""

import sys

from wsync.cli import main

if __name__ == "__main__":
    sys.exit(main())
