"""What is in an identity, read off its types, with another sensible value for each field; and what is not in it.

A field without a row here fails tests/core/test_identity.py and e2e/test_identity_matrix.py.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec

from tierkv.core.identity import Identity
from tierkv.wire.messages import OpenGroup, Request

Path = tuple[str, ...]


def paths_of(kind: type[msgspec.Struct]) -> list[Path]:
    """Every leaf field below a type, nested types included."""
    paths: list[Path] = []
    for name, hint in get_type_hints(kind).items():
        if name not in kind.__struct_fields__:
            continue
        nested = isinstance(hint, type) and issubclass(hint, msgspec.Struct)
        paths += [(name, *rest) for rest in paths_of(hint)] if nested else [(name,)]
    return paths


def changed(value: Any, path: Path, leaf: Any) -> Any:
    """`value` with the field at `path` replaced."""
    name, *rest = path
    new = changed(getattr(value, name), tuple(rest), leaf) if rest else leaf
    return msgspec.structs.replace(value, **{name: new})


def leaf_at(value: Any, path: Path) -> Any:
    for name in path:
        value = getattr(value, name)
    return value


def other_values(identity: Identity) -> dict[Path, Any]:
    """For each field a value that a node accepts in its place, and under which a block has as many bytes."""
    layout, parallel = identity.layout, identity.parallel
    first, *rest = layout.block_bytes
    return {
        ("weights",): "e7" * 32,
        ("config",): "rope scaled",
        ("layout", "dtype"): "float16",
        ("layout", "block_bytes"): (first + sum(rest),) if rest else (first // 2, first - first // 2),
        ("layout", "axes"): "token,layer",
        ("layout", "block_tokens"): layout.block_tokens * 2,
        ("layout", "engine"): f"{layout.engine} avx512",
        ("layout", "codec"): "fp8",
        ("adapter",): "ad" * 32,
        ("parallel", "tensor"): parallel.tensor + 1,
        ("parallel", "pipeline"): parallel.pipeline + 1,
        ("parallel", "context"): parallel.context + 1,
        ("parallel", "shards"): parallel.shards + 1,
        ("salt",): "another tenant",
        ("epoch",): "weights updated in place",
    }


def others(identity: Identity) -> dict[Path, Identity]:
    """`identity` with one field changed alone, for each of its fields."""
    return {path: changed(identity, path, value) for path, value in other_values(identity).items()}


BESIDE_THE_IDENTITY = set(OpenGroup.__struct_fields__) - set(Request.__struct_fields__) - {"identity", "block_bytes"}
"""What an engine says when it opens a group and that is not matched by. (`block_bytes` is compared, not matched.)"""
