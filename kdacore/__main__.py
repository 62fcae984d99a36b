"""``python -m kdacore`` is the ``kdacore`` command."""

from __future__ import annotations

import sys

from kdacore.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
