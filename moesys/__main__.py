"""`python -m moesys` is the `moesys` command."""

import sys

from moesys.cli import main

if __name__ == "__main__":
    sys.exit(main())
