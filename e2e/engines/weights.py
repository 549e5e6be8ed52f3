"""Other weights under the same names, in files of the same sizes."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

WEIGHTS = "model.safetensors"


def copy_model(model: Path, folder: Path, *, negated: Iterable[int]) -> Path:
    """In `folder`, with the values of these layers negated."""
    shutil.copytree(model, folder)
    negate_values(folder, negated)
    return folder


def negate_values(model: Path, layers: Iterable[int]) -> None:
    """Of the Llama in that folder, in place: each value in the attention of these layers changes its sign, and with it
    the KV of the layers behind, and what the model says. Twice is as it was."""
    with (model / WEIGHTS).open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        for layer in layers:
            tensor = header[f"model.layers.{layer}.self_attn.v_proj.weight"]
            assert tensor["dtype"] == "BF16"
            begin, end = (8 + length + offset for offset in tensor["data_offsets"])
            file.seek(begin)
            numbers = bytearray(file.read(end - begin))
            numbers[1::2] = bytes(
                byte ^ 0x80 for byte in numbers[1::2]
            )  # little-endian: the sign is in the second byte
            file.seek(begin)
            file.write(numbers)
