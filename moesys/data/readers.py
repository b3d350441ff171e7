"""One reader per format: files in, documents out, one at a time."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

PIECE_BYTES = 8 * 2**20
"""A text file longer than this is handed on in pieces, so that its size does not bound the memory."""


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    name: str
    text: str
    first: bool
    """Whether a document starts here."""


def text_file(file: Path, name: str, *, skip_undecodable: bool = False) -> Iterator[Piece]:
    """The file as one document; none when it is empty, or (if asked) when it is not UTF-8."""
    offset, first, rest = 0, True, b""
    with file.open("rb") as stream:
        while True:
            read = stream.read(PIECE_BYTES)
            last = len(read) < PIECE_BYTES
            block = rest + read
            cut = len(block) if last else _cut(block)
            try:
                text = block[:cut].decode()
            except UnicodeDecodeError as error:
                if skip_undecodable and first:
                    return
                raise ValueError(
                    f"{file} is not UTF-8: byte 0x{block[error.start]:02x} at offset {offset + error.start}; "
                    "convert it (iconv -t utf-8) or take it out of the folder"
                ) from error
            if text:
                yield Piece(name, text, first)
            if last:
                return
            offset, first, rest = offset + cut, False, block[cut:]


def json_lines(file: Path, field: str) -> Iterator[Piece]:
    """The field of every line's object; blank lines and empty texts are passed over."""
    opener = gzip.open if file.suffix == ".gz" else open
    number = 0
    try:
        with opener(file, "rb") as stream:
            for number, line in enumerate(stream, 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield from _row(
                        _json_object(line, f"{file}, line {number}"), field, f"{file}, line {number}"
                    )
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is damaged after line {number}: {error}; fetch it again") from error


def parquet(file: Path, field: str) -> Iterator[Piece]:
    """The column of every row; nulls and empty texts are passed over."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise _missing(field, names, str(file))
            row = 0
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield from _row({field: value}, field, f"{file}, row {row}")
                    row += 1
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file} is not a whole Parquet file: {error}") from error


def is_datasets_folder(path: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote this folder."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def datasets_folder(path: Path, field: str) -> Iterator[Piece]:
    """The column of every row of a saved Dataset; nulls and empty texts are passed over."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{path} needs the package datasets: pip install 'moesys[datasets]'") from error
    if not is_datasets_folder(path):
        raise ValueError(
            f"{path} has no state.json or dataset_dict.json; give a folder that save_to_disk wrote"
        )
    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises what its parts raise
        raise ValueError(f"{path} cannot be read by the package datasets: {error}") from error
    if isinstance(data, datasets.DatasetDict):
        raise ValueError(
            f"{path} has no split 'train'; give the folder of one of its splits: {', '.join(data)}"
        )
    if field not in data.column_names:
        raise _missing(field, data.column_names, str(path))
    rows = data.select_columns([field]).with_format(None)
    for start, batch in enumerate(rows.iter(batch_size=1024)):
        for row, value in enumerate(batch[field], start * 1024):
            yield from _row({field: value}, field, f"{path}, row {row}")


def _cut(block: bytes) -> int:
    """Where to end a piece: after the last line end, else before a last character that may be incomplete."""
    if line_end := block.rfind(b"\n") + 1:
        return line_end
    cut = len(block)
    while cut > len(block) - 4 and block[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1


def _json_object(line: bytes, place: str) -> dict[str, object]:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: not UTF-8 at byte {error.start} of the line; convert it (iconv -t utf-8)"
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{place}: not JSON ({error}); JSON lines hold one object a line, plain text needs "
            "--data.format text"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{place}: expected a JSON object, got {type(value).__name__}")
    return value


def _row(row: dict[str, object], field: str, place: str) -> Iterator[Piece]:
    if field not in row:
        raise _missing(field, list(row), place)
    text = row[field]
    if text is None or text == "":
        return
    if not isinstance(text, str):
        raise ValueError(
            f"{place}: field '{field}' holds {type(text).__name__}, not text; name another with "
            "--data.text-field"
        )
    try:
        name = blake2b(text.encode(), digest_size=16).hexdigest()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: field '{field}' holds half a surrogate pair (\\u{ord(text[error.start]):04x}) at "
            f"character {error.start}, which is no text; repair or remove the row"
        ) from error
    yield Piece(name, text, True)


def _missing(field: str, seen: list[str], place: str) -> ValueError:
    return ValueError(
        f"{place}: no field '{field}'; fields there: {', '.join(seen) or 'none'}; name one with "
        "--data.text-field"
    )
