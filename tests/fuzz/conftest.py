"""The files of this folder are scripts as well as tests, so they import each other by their bare names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
