"""`python -m samplers`: see `samplers.cli.sample`."""

import sys

from samplers.cli.sample import command_line, main

__all__ = ["command_line", "main"]

if __name__ == "__main__":
    sys.exit(main())
