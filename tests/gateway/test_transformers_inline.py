"""The transformers integration over a gateway: nothing of it knows that payload travels in frames."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.client.fake_node import FakeNode
from tests.gateway.gateway_thread import GatewayThread
from tierkv.client import connect

pytestmark = pytest.mark.engine

torch = pytest.importorskip("torch")


def test_a_prompt_is_stored_by_one_engine_and_reused_by_the_next(node_dir: Path, quick: None) -> None:
    from tests.integrations.tiny import prompt, tiny_llama
    from tierkv.integrations.model_loading import LoadedModel
    from tierkv.integrations.transformers import PrefixCache

    root = Path(tempfile.mkdtemp(prefix="tkv"))
    root.chmod(0o711)
    node = FakeNode(node_dir, pages=4096)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokens = prompt(50)
    try:
        with GatewayThread(node_dir, root / "i"), connect(root / "i", timeout_seconds=20) as client:
            results = []
            for salt in ("one", "one", "two"):
                model = tiny_llama(dtype=torch.float32)
                cache = PrefixCache(
                    LoadedModel(model=model, weights="ab" * 32, name="tiny"), client, block_tokens=16, salt=salt
                )
                results.append(cache.generate(tokens, max_new_tokens=4, do_sample=False))
            plain = tiny_llama(dtype=torch.float32).generate(tokens, max_new_tokens=4, do_sample=False)
            assert [result.use.reused_tokens for result in results] == [0, 48, 0]
            for result in results:
                assert list(result.new_tokens) == plain[0, 50:].tolist()
                assert not result.use.fault
    finally:
        torch.set_num_threads(threads)
        node.close()
        shutil.rmtree(root)
