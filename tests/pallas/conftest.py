"""Makes ``pallas_cases`` importable, and compiles quickly: these tests check many small programs
once each.

Tests of bits compile at full optimisation by themselves (``full_speed`` in ``pallas_cases``).
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8"
)
# The TPU interpreter runs one thread a core it imitates, and they wait for each other: two cores
# are too few.
os.environ.setdefault("NPROC", "16")
