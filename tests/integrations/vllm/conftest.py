"""Settings of a real vLLM engine for a tiny model, without an engine.

Each module here begins with `pytest.importorskip("vllm")`: the stage `engines` has it, others say that they skip it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from safetensors.torch import save_file

    from tests.integrations.vllm.engine import CONFIG

    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.embed_tokens.weight": torch.zeros(128, 64)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def plain_config(model_folder: Path) -> Any:
    """For tests that change nothing in it."""
    from tests.integrations.vllm.engine import engine_config

    return engine_config(model_folder)


@pytest.fixture
def vllm_config(plain_config: Any) -> Any:
    """The test's own copy."""
    return copy.deepcopy(plain_config)


@pytest.fixture
def kv_cache_config() -> Any:
    from tests.integrations.vllm.engine import kv_config

    return kv_config()
