"""Lossy codecs: what a block becomes before it enters its slot, and again when it is copied out of it.

A lossy codec is part of the identity (`Layout.codec`): files, slots and checksums of such a group hold coded bytes and
nothing else, in every tier alike, so an answer never depends on the tier. It is applied once, when the block is stored.

    raw block     [layer group 0: K and V of its layers, heads and tokens as the engine has them] [layer group 1] ...
    coded block   [layer group 0: scales | 0..12 bytes of zeros | numbers] [layer group 1] ...
                   scales   float32, one for each piece and head, in the order of the pieces
                   numbers  one byte each, [piece][head][token][dim]; they begin at a multiple of 16

`KVShape` says where the numbers of a raw block stand; `Layout.block_bytes` of a coded group are the coded sizes, made
by `Fp8.block_bytes` and nowhere else. Padding of the raw block is not stored and comes back as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np

from tierkv.core.fp8 import DECODERS, ENCODERS, ITEM_BYTES, ElementType, Pieces
from tierkv.core.identity import Layout
from tierkv.errors import ConfigError

FP8 = "fp8_e4m3"
"""The name in `Layout.codec`. Coding that makes other bytes gets another name, so that it makes another group."""

SCALE_BYTES = 4
NUMBERS_ALIGNMENT = 16


class Kind(StrEnum):
    KEYS = "keys"
    VALUES = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """K or V of one layer in a raw block: `heads` x `tokens` x `dim` numbers. `start` is where the first one stands in
    its layer group, `head_stride` and `token_stride` how far the next head and token are, all counted in elements; the
    numbers of one token and head lie together."""

    layer: int
    kind: Kind
    heads: int
    tokens: int
    dim: int
    start: int
    head_stride: int
    token_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What the numbers of a raw block are. `raw_bytes` and `pieces` have one entry a layer group. Raises ConfigError
    where pieces overlap or reach beyond their group."""

    element: ElementType
    raw_bytes: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    def __post_init__(self) -> None:
        if len(self.raw_bytes) != len(self.pieces):
            raise ConfigError("kv_shape", f"{len(self.pieces)} layer groups, and sizes of {len(self.raw_bytes)}")
        for group, (size, pieces) in enumerate(zip(self.raw_bytes, self.pieces, strict=True)):
            _check(f"kv_shape, layer group {group}", size, ITEM_BYTES[self.element], pieces)

    @property
    def total_raw_bytes(self) -> int:
        return sum(self.raw_bytes)

    @classmethod
    def head_first(cls, *, element: ElementType, layers: int, heads: int, tokens: int, dim: int) -> KVShape:
        """Of blocks [layer][kv][head][token][dim], all in one layer group and without padding."""
        piece = heads * tokens * dim
        pieces = tuple(
            Piece(
                layer=number // 2,
                kind=(Kind.KEYS, Kind.VALUES)[number % 2],
                heads=heads,
                tokens=tokens,
                dim=dim,
                start=number * piece,
                head_stride=tokens * dim,
                token_stride=dim,
            )
            for number in range(2 * layers)
        )
        return cls(element=element, raw_bytes=(2 * layers * piece * ITEM_BYTES[element],), pieces=(pieces,))


class BlockCodec(Protocol):
    """`raw_bytes` and `block_bytes`: of a block in each layer group, before and after coding."""

    @property
    def name(self) -> str: ...

    @property
    def raw_bytes(self) -> tuple[int, ...]: ...

    @property
    def block_bytes(self) -> tuple[int, ...]: ...

    def encode(self, raw: np.ndarray, coded: np.ndarray) -> int:
        """Code blocks: uint8 [n, raw] into writable uint8 [n, coded]; rows may lie apart. How many, from the first,
        are coded: the next one holds a number that is not finite and must not be stored."""

    def decode(self, coded: np.ndarray, raw: np.ndarray) -> int:
        """The way back. How many, from the first, are right: the next one is damaged, and its raw row holds anything.
        Every number of a right one is finite."""


def codec_of(name: str, shape: KVShape) -> BlockCodec:
    """The lossy codec of a layout, for blocks of `shape`. ConfigError for a name that this program does not know."""
    if name != FP8:
        raise ConfigError("layout.codec", f"{name!r} is no lossy codec that is known here; there is {FP8!r}")
    return Fp8(shape)


def coded_layout(layout: Layout, codec: BlockCodec) -> Layout:
    """The layout of the group whose blocks are `layout`'s, coded."""
    return msgspec.structs.replace(layout, codec=codec.name, block_bytes=codec.block_bytes)


class Fp8:
    """Numbers as float8_e4m3fn, with one scale for each piece (a layer's keys or values) and head of a block.

    A number x is stored as the e4m3 number nearest to x / scale (ties to even, saturating), and comes back as number *
    scale in the engine's element type. With s the scale, what comes back differs from x by at most
    max(|x| / 16, s / 1024), but for the rounding of the element type and, where a head's largest magnitude is beyond
    448 times the largest scale, saturation. The sign of zero is kept. See `tierkv.core.fp8` for how a scale is chosen.
    """

    name = FP8

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.raw_bytes = shape.raw_bytes
        self.block_bytes = tuple(_Coded.of(pieces).num_bytes for pieces in shape.pieces)
        item = ITEM_BYTES[shape.element]
        self._encode, self._decode = ENCODERS[shape.element], DECODERS[shape.element]
        self._groups = list(_groups(shape, item))

    def encode(self, raw: np.ndarray, coded: np.ndarray) -> int:
        for number, (raw_row, coded_row) in enumerate(zip(raw, coded, strict=True)):
            for group in self._groups:
                if not self._encode_group(group, raw_row, coded_row):
                    return number
        return len(raw)

    def decode(self, coded: np.ndarray, raw: np.ndarray) -> int:
        for number, (coded_row, raw_row) in enumerate(zip(coded, raw, strict=True)):
            for group in self._groups:
                if not self._decode_group(group, coded_row, raw_row):
                    return number
        return len(coded)

    def _encode_group(self, group: _Group, raw_row: np.ndarray, coded_row: np.ndarray) -> bool:
        raw, (scales, gap, numbers) = group.raw_of(raw_row), group.coded_of(coded_row)
        gap[:] = 0
        for band in group.bands:
            band_scales, band_numbers = band.coded_in(scales, numbers)
            if not self._encode(band.raw_in(raw), band_scales, band_numbers):
                return False
        return True

    def _decode_group(self, group: _Group, coded_row: np.ndarray, raw_row: np.ndarray) -> bool:
        raw, (scales, _gap, numbers) = group.raw_of(raw_row), group.coded_of(coded_row)
        if group.has_padding:
            raw[:] = 0
        return all(self._decode(*band.coded_in(scales, numbers), band.raw_in(raw)) for band in group.bands)


@dataclass(frozen=True, slots=True)
class _Coded:
    """One layer group of a coded block, by counts of its scales and numbers."""

    scales: int
    numbers: int

    @classmethod
    def of(cls, pieces: tuple[Piece, ...]) -> _Coded:
        heads = sum(piece.heads for piece in pieces)
        return cls(heads, sum(piece.heads * piece.tokens * piece.dim for piece in pieces))

    @property
    def scale_bytes(self) -> int:
        return self.scales * SCALE_BYTES

    @property
    def numbers_begin(self) -> int:
        return -(-self.scale_bytes // NUMBERS_ALIGNMENT) * NUMBERS_ALIGNMENT

    @property
    def num_bytes(self) -> int:
        """The one formula of a coded size."""
        return self.numbers_begin + self.numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Band:
    """Neighbouring pieces that differ in nothing but their place, evenly spaced: moved as one array [piece, head,
    token, dim]. `first_scale` and `first_number` are where theirs begin in the group."""

    first: Piece
    count: int
    step: int
    first_scale: int
    first_number: int

    def raw_in(self, raw: np.ndarray) -> Pieces:
        piece, item = self.first, raw.itemsize
        return np.lib.stride_tricks.as_strided(
            raw[piece.start :],
            (self.count, piece.heads, piece.tokens, piece.dim),
            (self.step * item, piece.head_stride * item, piece.token_stride * item, item),
        )

    def coded_in(self, scales: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        piece = self.first
        heads = self.count * piece.heads
        length = heads * piece.tokens * piece.dim
        return (
            scales[self.first_scale : self.first_scale + heads].reshape(self.count, piece.heads),
            numbers[self.first_number : self.first_number + length].reshape(
                self.count, piece.heads, piece.tokens, piece.dim
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    raw_begin: int
    raw_end: int
    coded_begin: int
    coded: _Coded
    item: int
    bands: list[_Band] = field(default_factory=list)

    @property
    def has_padding(self) -> bool:
        return self.coded.numbers * self.item < self.raw_end - self.raw_begin

    def raw_of(self, row: np.ndarray) -> np.ndarray:
        return row[self.raw_begin : self.raw_end].view(f"u{self.item}")

    def coded_of(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        part = row[self.coded_begin : self.coded_begin + self.coded.num_bytes]
        scales, numbers = self.coded.scale_bytes, self.coded.numbers_begin
        return part[:scales].view("<f4"), part[scales:numbers], part[numbers:]


def _groups(shape: KVShape, item: int) -> Iterator[_Group]:
    raw_begin = coded_begin = 0
    for size, pieces in zip(shape.raw_bytes, shape.pieces, strict=True):
        coded = _Coded.of(pieces)
        yield _Group(
            raw_begin=raw_begin,
            raw_end=raw_begin + size,
            coded_begin=coded_begin,
            coded=coded,
            item=item,
            bands=_bands(pieces),
        )
        raw_begin += size
        coded_begin += coded.num_bytes


def _bands(pieces: tuple[Piece, ...]) -> list[_Band]:
    bands: list[_Band] = []
    scale = number = 0
    for piece in pieces:
        last = bands[-1] if bands else None
        if last is not None and _continues(last, piece):
            step = piece.start - last.first.start if last.count == 1 else last.step
            bands[-1] = replace(last, count=last.count + 1, step=step)
        else:
            bands.append(_Band(first=piece, count=1, step=0, first_scale=scale, first_number=number))
        scale += piece.heads
        number += piece.heads * piece.tokens * piece.dim
    return bands


def _continues(band: _Band, piece: Piece) -> bool:
    moved = replace(piece, layer=band.first.layer, kind=band.first.kind, start=band.first.start)
    if moved != band.first:
        return False
    return band.count == 1 or piece.start == band.first.start + band.count * band.step


def _check(where: str, size: int, item: int, pieces: tuple[Piece, ...]) -> None:
    if not pieces or size < 1 or size % item:
        raise ConfigError(where, f"{size} bytes and {len(pieces)} pieces; it has whole elements of at least one")
    covered = np.zeros(size // item, np.bool_)
    for piece in pieces:
        name = f"{where}, {piece.kind} of layer {piece.layer}"
        if min(piece.heads, piece.tokens, piece.dim) < 1 or min(piece.start, piece.head_stride, piece.token_stride) < 0:
            raise ConfigError(name, f"{piece}: a size below 1, or a place below 0")
        end = piece.start + (piece.heads - 1) * piece.head_stride + (piece.tokens - 1) * piece.token_stride + piece.dim
        if end > len(covered):
            raise ConfigError(name, f"ends at element {end}, and the layer group has {len(covered)}")
        places = _places(piece)
        if covered[places].any() or len(np.unique(places)) != len(places):
            raise ConfigError(name, "shares elements with another piece, or with itself")
        covered[places] = True


def _places(piece: Piece) -> np.ndarray:
    heads = np.arange(piece.heads)[:, None, None] * piece.head_stride
    tokens = np.arange(piece.tokens)[:, None] * piece.token_stride
    return (piece.start + heads + tokens + np.arange(piece.dim)).reshape(-1)
