"""The oracles of the layer and the layouts over ranks serve here too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "moe"))
sys.path.insert(0, str(Path(__file__).parents[1] / "parallelize"))
