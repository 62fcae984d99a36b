"""Makes ``pallas_cases`` importable."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# The TPU interpreter runs one thread a core it imitates, and they wait for each other: two cores
# are too few.
os.environ.setdefault("NPROC", "16")
