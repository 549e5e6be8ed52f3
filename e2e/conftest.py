"""What lies under scripts/ is no package of the product: its folder is put on the path for these tests only."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
