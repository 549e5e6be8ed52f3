"""The demo's inference engine: a process of its own, so that killing it is real. Driven by lines of JSON.

usage: engine.py MODEL DATA_DIR DTYPE...

Each line on stdin is a call, {"do": name, ...arguments}, each line on stdout its answer. Loading the models and their
first forward pass are over when the first line, {"ready": seconds}, is out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from transformers import AutoTokenizer, DynamicCache
from transformers.utils import logging

from demo_lib.prompts import make_prompts
from tierkv.client import connect
from tierkv.integrations.transformers import LoadedModel, PrefixCache, load_model

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
WARM_UP_TOKENS = 32


class FirstToken:
    """A streamer that notes when the first token is out."""

    def __init__(self) -> None:
        self.puts = 0
        self.at = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:  # the prompt comes first
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


class Engine:
    def __init__(self, model: Path, data_dir: Path, dtypes: list[str]) -> None:
        self._model_path = model
        self._client = connect(data_dir=data_dir)
        self._loaded: dict[str, LoadedModel] = {}
        self._caches: dict[tuple[str, str], PrefixCache] = {}
        self._kept: dict[tuple[str, str], DynamicCache] = {}
        for dtype in dtypes:
            self._loaded[dtype] = load_model(model, dtype=getattr(torch, dtype), data_dir=data_dir)
            self._cache(dtype, "")
            self.plain(dtype=dtype, tokens=list(range(1, WARM_UP_TOKENS)), new_tokens=2)

    def prompts(self, *, code_tokens: int) -> list[dict[str, Any]]:
        tokenizer = AutoTokenizer.from_pretrained(self._model_path)
        return [asdict(prompt) for prompt in make_prompts(tokenizer, code_tokens=code_tokens)]

    def plain(self, *, dtype: str, tokens: list[int], new_tokens: int) -> dict[str, Any]:
        """The library alone."""
        return self._generate(dtype, tokens, new_tokens, DynamicCache(config=self._loaded[dtype].model.config))

    def cached(
        self, *, dtype: str, tokens: list[int], new_tokens: int, salt: str = "", keep: str = ""
    ) -> dict[str, Any]:
        """With tierkv. `keep` is a name under which the KV stays in this process, for `split` and `digest`."""
        result = self._cache(dtype, salt).generate(torch.tensor([tokens]), max_new_tokens=new_tokens, **GREEDY)
        if keep:
            self._kept[dtype, keep] = result.cache
        return {
            "ttft": result.time_to_first_token_seconds,
            "seconds": result.total_seconds,
            "new": result.new_tokens,
            "kv": _digest(result.cache, result.use.reused_tokens),
            **asdict(result.use),
        }

    def split(self, *, dtype: str, kept: str, at: int, tokens: list[int], new_tokens: int) -> dict[str, Any]:
        """The library alone on `tokens`, but for the first `at`, whose KV is the kept one, computed in this process."""
        cache = DynamicCache(config=self._loaded[dtype].model.config)
        for index, layer in enumerate(self._kept[dtype, kept].layers):
            cache.update(layer.keys[:, :, :at].clone(), layer.values[:, :, :at].clone(), index)
        return self._generate(dtype, tokens, new_tokens, cache)

    def digest(self, *, dtype: str, kept: str, tokens: int) -> str:
        """Of the kept KV of the first tokens."""
        return _digest(self._kept[dtype, kept], tokens)

    def flush(self, *, dtype: str, tokens: list[int]) -> dict[str, Any]:
        sealed = self._cache(dtype, "").flush(torch.tensor([tokens]), deadline_seconds=60.0)
        return {"blocks": sealed.blocks, "flushed": sealed.flushed_blocks, "reason": sealed.reason}

    def _cache(self, dtype: str, salt: str) -> PrefixCache:
        if (dtype, salt) not in self._caches:
            self._caches[dtype, salt] = PrefixCache(self._loaded[dtype], self._client, salt=salt)
        return self._caches[dtype, salt]

    def _generate(self, dtype: str, tokens: list[int], new_tokens: int, cache: DynamicCache) -> dict[str, Any]:
        ids, watch, started = torch.tensor([tokens]), FirstToken(), time.perf_counter()
        output = self._loaded[dtype].model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=new_tokens,
            streamer=watch,
            **GREEDY,
        )
        seconds = time.perf_counter() - started
        return {"ttft": watch.at - started, "seconds": seconds, "new": output[0, len(tokens) :].tolist()}


def _digest(cache: DynamicCache, tokens: int) -> str:
    digest = blake3()
    for layer in cache.layers if tokens else []:
        for tensor in (layer.keys, layer.values):
            digest.update(tensor[:, :, :tokens].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get between the answers
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    started = time.perf_counter()
    engine = Engine(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    print(json.dumps({"ready": time.perf_counter() - started}), file=answers)
    for line in sys.stdin:
        call = json.loads(line)
        verb: Callable[..., Any] = getattr(engine, call.pop("do"))
        print(json.dumps({"answer": verb(**call)}), file=answers)


if __name__ == "__main__":
    main()
