"""What the checkpoint tests share with those of layouts: a tiny model, and how it trains under a layout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
