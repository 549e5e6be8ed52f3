"""Whose bytes are there? Traces a wrong block, byte for byte, to the layer of the block they belong to.

    oracle = Oracle()
    oracle.know("salt a", 7, keys, layers)     # prompt 7 of that name, as many blocks as there are keys
    oracle.explain(found, expected)            # "bytes 4096..8191: salt a prompt 7 block 3 layer 1 from byte 0"

What is of no known owner is called zeros, poison (never copied), unfinished (and by which process), flipped bits, a
stream of somebody unknown, or unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.core.keys import split_keys
from tierkv.torture.streams import STEP, WORD_BYTES, owner_of, unmix

POISON = 0xA5
"""What a destination is filled with before blocks are copied into it."""

UNFINISHED = b"half-written by "
"""How memory begins, every 32 bytes, whose writer has not finished; 16 bytes with the writer's number follow."""

SOMEBODY = "a stream of somebody unknown"

_PIECE_BYTES = 512
_LONGEST_STREAM_BYTES = 2**20
_FEW_BITS = 8


@dataclass(frozen=True, slots=True)
class Owner:
    """One layer of one block of one rank."""

    name: str
    prompt: int
    block: int
    layer: int
    rank: int = 0

    def __str__(self) -> str:
        rank = f" rank {self.rank}" if self.rank else ""
        return f"{self.name} prompt {self.prompt} block {self.block} layer {self.layer}{rank}"


@dataclass(frozen=True, slots=True)
class Foreign:
    """Bytes of a block that should not be there. `owner` None: of nobody who is known; `whose` says it in words."""

    first_byte: int
    num_bytes: int
    whose: str
    owner: Owner | None = None

    def __str__(self) -> str:
        return f"bytes {self.first_byte}..{self.first_byte + self.num_bytes - 1}: {self.whose}"


class Oracle:
    """Knows owners. Looking one up is slow and meant for a run that has failed anyhow."""

    def __init__(self) -> None:
        self._owners: dict[int, Owner] = {}
        self._known: dict[tuple[str, int, int], int] = {}

    def know(self, name: str, prompt: int, keys: bytes, layers: Sequence[int], *, rank: int = 0) -> None:
        """The blocks of `keys`, of prompt number `prompt` of the identity that people call `name`."""
        split = split_keys(keys)
        known = self._known.get((name, prompt, rank), 0)
        for block in range(known, len(split)):
            for layer in range(len(layers)):
                owner = owner_of(split[block], rank, layer)
                self._owners.setdefault(owner, Owner(name, prompt, block, layer, rank))
        self._known[name, prompt, rank] = max(known, len(split))

    def explain(self, found: np.ndarray, expected: np.ndarray) -> str:
        """Where a block is wrong, and whose bytes are there; empty when it is right."""
        return "; ".join(map(str, self.trace(found, expected)))

    def trace(self, found: np.ndarray, expected: np.ndarray) -> list[Foreign]:
        """The bytes of a block that are not as expected, in pieces of one owner each."""
        differs = found != expected
        traced: list[Foreign] = []
        for start, stop in _wrong_stretches(differs):
            traced += self._trace_stretch(found[start:stop], expected[start:stop], start)
        return traced

    def _trace_stretch(self, found: np.ndarray, expected: np.ndarray, start: int) -> list[Foreign]:
        pieces: list[Foreign] = []
        for at in range(0, len(found), _PIECE_BYTES):
            wanted = slice(at, at + _PIECE_BYTES)
            whose, owner = self._identify(found[wanted], expected[wanted])
            size = len(found[wanted])
            last = pieces[-1] if pieces else None
            if last is not None and (last.owner == owner if owner is not None else last.whose == whose):
                pieces[-1] = Foreign(last.first_byte, last.num_bytes + size, last.whose, owner)
            else:
                pieces.append(Foreign(start + at, size, whose, owner))
        return pieces

    def _identify(self, piece: np.ndarray, expected: np.ndarray) -> tuple[str, Owner | None]:
        if not piece.any():
            return "zeros", None
        if (piece == POISON).all():
            return "poison: never copied", None
        mark = piece.tobytes().find(UNFINISHED)
        if mark >= 0:
            number = piece[mark + len(UNFINISHED) : mark + 2 * len(UNFINISHED)].tobytes()
            return f"unfinished: the copy of process {int.from_bytes(number, 'little')}", None
        flipped = int(np.unpackbits(piece ^ expected).sum())
        if flipped <= _FEW_BITS:
            return f"{flipped} flipped bits", None
        return self._find_stream(piece)

    def _find_stream(self, piece: np.ndarray) -> tuple[str, Owner | None]:
        """A stream may lie there at any offset, of its own or of the place."""
        for shift in range(min(WORD_BYTES, len(piece))):
            words = piece[shift : shift + (len(piece) - shift) // WORD_BYTES * WORD_BYTES].copy().view("<u8")
            origins = unmix(words.astype(np.uint64, copy=False))
            follows = np.flatnonzero(origins[1:] - origins[:-1] == STEP)
            if len(follows):
                at = int(follows[0])
                return self._name(int(origins[at]), shift + at * WORD_BYTES)
        return f"unknown: {piece[:16].tobytes().hex()}", None

    def _name(self, origin: int, offset: int) -> tuple[str, Owner | None]:
        """The stream whose word has this origin, `offset` bytes behind the start of a piece."""
        steps = np.arange(1, _LONGEST_STREAM_BYTES // WORD_BYTES + 1, dtype=np.uint64) * STEP
        candidates = np.uint64(origin) - steps
        known = np.fromiter(self._owners, np.uint64, len(self._owners))
        hits = np.flatnonzero(np.isin(candidates, known))
        if not len(hits):
            return SOMEBODY, None
        word = int(hits[0])
        owner = self._owners[int(candidates[word])]
        return f"{owner} from byte {max(0, word * WORD_BYTES - offset)}", owner


def first_wrong(found: np.ndarray, expected: np.ndarray) -> int | None:
    """The first row that is not as expected."""
    same = (found == expected).all(axis=1)
    return None if same.all() else int(np.argmin(same))


def unfinished(num_bytes: int, process: int) -> np.ndarray:
    """What is in slots whose writer, of that number, has not finished."""
    mark = UNFINISHED + process.to_bytes(len(UNFINISHED), "little")
    return np.frombuffer((mark * (num_bytes // len(mark) + 1))[:num_bytes], np.uint8)


def _wrong_stretches(differs: np.ndarray) -> list[tuple[int, int]]:
    """Where it is wrong; equal bytes in between, which are chance, are taken along when they are few."""
    wrong = np.flatnonzero(differs)
    if not len(wrong):
        return []
    cuts = np.flatnonzero(np.diff(wrong) > WORD_BYTES)
    starts = [int(wrong[0]), *(int(wrong[cut + 1]) for cut in cuts)]
    stops = [*(int(wrong[cut]) + 1 for cut in cuts), int(wrong[-1]) + 1]
    return list(zip(starts, stops, strict=True))
