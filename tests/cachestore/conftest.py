"""Makes the folder's helpers importable by name, whichever test runs first."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
