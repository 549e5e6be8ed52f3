"""May this group be opened here, and may it be written to disk?"""

from __future__ import annotations

import re

from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.core.reasons import Reason
from tierkv.core.slabs import PAGE_BYTES
from tierkv.wire.messages import MAX_TEXT, Error, ErrorCode, OpenGroup

MAX_BLOCK_TOKENS = 65_536
MAX_SHARDS = 1_024
MAX_LAYER_GROUPS = 65_536
MAX_MANIFEST_BYTES = 2**20

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def why_refused(request: OpenGroup, *, slab_bytes: int) -> Error | None:
    """A layout that can't be, or that is not the one of the engine's real buffers, or too large for this node."""
    if gap := request.identity.find_gap():
        return Error(id=request.id, code=ErrorCode.INVALID, problem=gap[1], field=f"identity.{gap[0]}")
    layout, parallel = request.identity.layout, request.identity.parallel
    if problem := _problem_of_size(request) or _problem_of_layout(layout) or _problem_of_parallel(parallel):
        field, what = problem
        return Error(id=request.id, code=ErrorCode.INVALID, problem=what, field=field)
    if request.block_bytes != layout.total_block_bytes:
        return Error(
            id=request.id,
            code=ErrorCode.LAYOUT_MISMATCH,
            problem=f"the buffers have {request.block_bytes} bytes a block, the layout says {layout.total_block_bytes}",
            field="block_bytes",
        )
    slot_bytes = -(-request.block_bytes // PAGE_BYTES) * PAGE_BYTES
    if slot_bytes > slab_bytes:
        return Error(
            id=request.id,
            code=ErrorCode.INVALID,
            problem=f"a block takes {slot_bytes} bytes, and a slab of this node has {slab_bytes}; raise slab_bytes",
            field="block_bytes",
        )
    return None


def why_not_persistent(identity: Identity, *, has_nvme: bool, asked: bool) -> Reason | None:
    """None: its extents go to disk. Weights without a fingerprint name no folder."""
    if not has_nvme:
        return Reason.NVME_OFF
    if not asked or not identity.is_persistent or not _FINGERPRINT.fullmatch(identity.weights):
        return Reason.NOT_PERSISTENT
    return None


def _problem_of_size(request: OpenGroup) -> tuple[str, str] | None:
    """What a node remembers of every group for as long as it lives is bounded, and so is what an engine may say of
    one. Layer groups are many in a deep model, texts and file names are short."""
    for where, texts in (("identity", request.identity), ("identity.layout", request.identity.layout)):
        for name in texts.__struct_fields__:
            value = getattr(texts, name)
            if isinstance(value, str) and len(value) > MAX_TEXT:
                return f"{where}.{name}", f"{len(value)} characters are more than {MAX_TEXT}"
    if sum(len(entry.name) + len(entry.digest) for entry in request.manifest) > MAX_MANIFEST_BYTES:
        return "manifest", f"its names are longer than {MAX_MANIFEST_BYTES} bytes together"
    return None


def _problem_of_layout(layout: Layout) -> tuple[str, str] | None:
    if not 1 <= layout.block_tokens <= MAX_BLOCK_TOKENS:
        return "identity.layout.block_tokens", f"{layout.block_tokens} is not in 1 .. {MAX_BLOCK_TOKENS}"
    sizes = layout.block_bytes
    if not 1 <= len(sizes) <= MAX_LAYER_GROUPS or not all(0 <= size < 2**62 for size in sizes) or not any(sizes):
        return "identity.layout.block_bytes", "a block has at least one byte, and no layer group fewer than none"
    return None


def _problem_of_parallel(parallel: Parallel) -> tuple[str, str] | None:
    for name in ("tensor", "pipeline", "context", "shards"):
        size = getattr(parallel, name)
        if not 1 <= size <= MAX_SHARDS:
            return f"identity.parallel.{name}", f"{size} is not in 1 .. {MAX_SHARDS}"
    return None
