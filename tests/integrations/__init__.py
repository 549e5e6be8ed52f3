"""Tests of the integrations. Without torch and transformers every module in here is skipped, with this reason."""

import pytest

for _library in ("torch", "transformers"):
    pytest.importorskip(_library, reason=f"needs {_library}: pip install 'tierkv-cache[transformers]'")
