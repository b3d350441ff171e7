"""Which text is held out: documents by their names, or the end of the only one there is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import Literal

from moesys.data.corpus import Source
from moesys.data.readers import Piece

Part = Literal["train", "held_out"]


def is_held_out(name: str, share: float) -> bool:
    """Whether the document of this name is held out: by its name's hash alone, so order, place and the other
    documents do not matter."""
    return _place(name) < share * 2**64


def has_one_document(source: Source) -> bool:
    """Whether all text of a source is one document, as a single text file is. Tells it from the first rows."""
    if source.kind in ("stdlib", "text"):
        return len(document_names(source)) == 1
    return sum(1 for _ in islice((piece for piece in source.pieces() if piece.first), 2)) == 1


def document_names(source: Source) -> list[str]:
    """Of a text source: the names of its files, the empty ones left out."""
    return [source.name_of(file) for file in source.files if file.stat().st_size]


def split(source: Source, share: float) -> Iterator[tuple[Part, Piece]]:
    """The documents in order, each with the part that it belongs to.

    Share 0 puts every document into "train", share 1 into "held_out". In between, the last `share` of an only
    document is held out, from a line start on if one is near.
    """
    if 0 < share < 1 and has_one_document(source):
        size = source.num_bytes if source.kind in ("stdlib", "text") else None
        yield from _cut_in_two(source.pieces(), size, share)
        return
    for piece in source.pieces():
        yield ("held_out" if is_held_out(piece.name, share) else "train"), piece


def share_that_splits(names: Iterable[str], share: float) -> float | None:
    """A share close to the given one, with few digits, that leaves documents of these names on both sides."""
    places = sorted(_place(name) / 2**64 for name in names)
    for digits in range(1, 10):
        step = 10.0**-digits
        below, above = round(places[-1] // step * step, digits), round((places[0] // step + 1) * step, digits)
        for candidate in sorted((below, above), key=lambda value: abs(value - share)):
            if 0 < candidate < 1 and places[0] < candidate <= places[-1]:
                return candidate
    return None


def _place(name: str) -> int:
    digest = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "big")


def _cut_in_two(pieces: Iterable[Piece], size: int | None, share: float) -> Iterator[tuple[Part, Piece]]:
    """The pieces of one document of `size` bytes; None where there is a single piece, whose size it is."""
    part: Part = "train"
    at, first = 0, True
    for piece in pieces:
        data = piece.text.encode()
        total = len(data) if size is None else size
        target = min(max(round(total * (1 - share)), 1), total - 1)
        if part == "train" and at + len(data) > target:
            cut = _near_line_start(data, target - at, room=min(target, total - target) // 2)
            if cut:
                yield part, Piece(piece.name, data[:cut].decode(), first)
            part, first, data = "held_out", True, data[cut:]
        at += len(data)
        if data:
            yield part, Piece(piece.name, data.decode(), first)
            first = False


def _near_line_start(data: bytes, target: int, room: int) -> int:
    """The line start nearest before target, else after it, at most `room` bytes away; else the character there."""
    if before := data.rfind(b"\n", max(target - room, 0), target) + 1:
        return before
    if after := data.find(b"\n", target, target + room) + 1:
        return after
    while target > 0 and data[target] & 0xC0 == 0x80:
        target -= 1
    return target
