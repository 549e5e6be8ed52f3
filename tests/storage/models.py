"""Small model folders for the tests of fingerprints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LONG_AGO_NS = 10_000_000_000  # how far the clock of a test runs ahead, so that files made just now are settled

ADAPTER = {
    "r": 8,
    "lora_alpha": 16,
    "use_rslora": False,
    "target_modules": ["q_proj", "v_proj"],
    "alpha_pattern": {},
    "rank_pattern": {},
    "base_model_name_or_path": "/somewhere/base",
    "inference_mode": True,
    "task_type": "CAUSAL_LM",
    "peft_version": "0.1",
}


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"first shard " * 100)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"second shard" * 100)
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_snapshot(folder: Path) -> Path:
    """As a hub's cache has it: blobs by digest, and a snapshot of links to them."""
    model = make_model(folder / "made")
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / f"blob{number}", snapshot))
    model.rmdir()
    return snapshot


def make_adapter(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"low rank" * 100)
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER | changes))
    return folder


def change_byte(path: Path) -> None:
    """Change one byte, and put size and mtime back as they were."""
    before = path.stat()
    with path.open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
