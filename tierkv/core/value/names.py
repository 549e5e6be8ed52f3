"""The names of the policies in the settings."""

from __future__ import annotations

from typing import Literal

PolicyName = Literal["density", "lru", "arc", "gdsf", "literal"]
