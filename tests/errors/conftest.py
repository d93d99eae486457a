"""Makes the cases beside the test importable by their names."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "unit" / "ledger"))  # its builders
