"""Settings of a real vLLM engine for a tiny model, without an engine.

Tests that need vLLM say so themselves (`pytest.importorskip("vllm")` before their other imports); the others run
anywhere.
"""

from __future__ import annotations

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


@pytest.fixture
def vllm_config(model_folder: Path) -> Any:
    from tests.integrations.vllm.engine import engine_config

    return engine_config(model_folder)


@pytest.fixture
def kv_cache_config() -> Any:
    from tests.integrations.vllm.engine import kv_config

    return kv_config()
