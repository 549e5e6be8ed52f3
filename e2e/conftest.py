"""The ledger of the unit tests holds here too; and what lies under scripts/ is no package of the product: its folder is
put on the path for these tests only."""

import sys
from pathlib import Path

from tests.conftest import cores, ledger, own_surroundings, runtime_dir

__all__ = ["cores", "ledger", "own_surroundings", "runtime_dir"]

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
