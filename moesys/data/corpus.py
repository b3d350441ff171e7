"""Where text comes from: finding a source's files, telling what they are, and reading them as documents."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from moesys.data import megatron, readers
from moesys.data.readers import Piece

Kind = Literal["stdlib", "text", "jsonl", "parquet", "datasets", "megatron"]
SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
    ".idx": "megatron",
    ".bin": "megatron",
}
NO_CODE = frozenset({"site-packages", "dist-packages", "__pycache__"})
TESTS = frozenset({"test", "tests", "idle_test"})
"""Folders of the standard library that not every machine has (Debian packages them apart)."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of one kind under one root."""

    kind: Kind
    root: Path
    """The file or folder that was given, absolute; of Megatron files the path without suffix."""
    files: tuple[Path, ...]
    """What is read, sorted by path below the root."""
    text_field: str

    @property
    def title(self) -> str:
        """What to call it in one line."""
        if self.kind == "stdlib":
            return f"standard library of Python {sys.version_info.major}.{sys.version_info.minor}"
        return str(self.root)

    @property
    def num_bytes(self) -> int:
        """Size of the files; of compressed ones, that of the compressed form."""
        return sum(file.stat().st_size for file in self.files)

    def identity(self) -> list[object]:
        """What tells this source from any other and from itself after a change, as JSON."""
        stats = ((self.name_of(file), file.stat()) for file in self.files)
        rows = [
            [name.encode("utf-8", "surrogateescape").hex(), s.st_size, s.st_mtime_ns] for name, s in stats
        ]
        return [self.kind, str(self.root), self.text_field, rows]

    def name_of(self, file: Path) -> str:
        """A file's path below the root."""
        alone = self.kind == "megatron" or file == self.root
        return file.name if alone else file.relative_to(self.root).as_posix()

    def pieces(self) -> Iterator[Piece]:
        """The documents in order, streamed.

        Documents of text sources are named by their file, those in rows by a hash of their text. Raises
        ValueError naming the file, the row and the field that are wrong.
        """
        match self.kind:
            case "stdlib":
                for file in self.files:
                    yield from readers.text_file(file, self.name_of(file), skip_undecodable=True)
            case "text":
                for file in self.files:
                    yield from readers.text_file(file, self.name_of(file))
            case "jsonl":
                for file in self.files:
                    yield from readers.json_lines(file, self.text_field)
            case "parquet":
                for file in self.files:
                    yield from readers.parquet(file, self.text_field)
            case "datasets":
                yield from readers.datasets_folder(self.root, self.text_field)
            case "megatron":
                raise AssertionError("Megatron files hold tokens, not text")


def find_source(source: str, *, format: str = "auto", text_field: str = "text") -> Source:
    """The files of a source: "stdlib", a file, a folder or a Megatron prefix; "auto" goes by what is there.

    Of a saved DatasetDict it is the split "train".
    Raises FileNotFoundError when nothing is there, ValueError when what is there is empty or could be several
    things.
    """
    if source == "stdlib" and format == "auto":
        root = Path(sysconfig.get_paths()["stdlib"]).resolve()
        return _source(
            "stdlib", root, [file for file in _walk(root, TESTS) if file.suffix == ".py"], text_field
        )
    path = Path(source).expanduser().resolve()
    prefix = megatron.prefix_of(path)
    if not path.exists() and prefix is None:
        raise FileNotFoundError(
            f"data: nothing at {source}; give 'stdlib', a file or folder, or the prefix of a Megatron "
            ".bin/.idx pair"
        )
    kind = _detect(path) if format == "auto" else cast(Kind, format)
    if kind == "megatron":
        if prefix is None:
            raise ValueError(
                f"data: {source} is not one Megatron .bin/.idx pair; give the path of its .idx file"
            )
        return _source(kind, prefix, list(megatron.files_of(prefix)), text_field)
    if kind == "datasets" and (path / "dataset_dict.json").is_file() and (path / "train").is_dir():
        path = path / "train"
    return _source(kind, path, _files(path, kind), text_field)


def _source(kind: Kind, root: Path, files: list[Path], text_field: str) -> Source:
    if not files:
        raise ValueError(
            f"data: no {kind} files in {root}; check the path, or name the format with --data.format"
        )
    return Source(kind=kind, root=root, files=tuple(files), text_field=text_field)


def _walk(root: Path, besides: frozenset[str] = frozenset()) -> list[Path]:
    """Every file under the folder, sorted; hidden ones, compiled or installed code and `besides` are left out."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NO_CODE | besides and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(
        (file for file in found if file.is_file()), key=lambda file: file.relative_to(root).as_posix()
    )


def _suffix_kind(file: Path) -> Kind | None:
    return next((kind for suffix, kind in SUFFIXES.items() if file.name.endswith(suffix)), None)


def _files(path: Path, kind: Kind) -> list[Path]:
    if path.is_file():
        if kind == "datasets":
            raise ValueError(
                f"data: {path} is a file; a datasets source is the folder that save_to_disk wrote"
            )
        return [path]
    files = _walk(path)
    if kind in ("text", "datasets"):
        return files
    also = (".json", ".json.gz") if kind == "jsonl" else ()
    return [file for file in files if _suffix_kind(file) == kind or file.name.endswith(also)]


def _detect(path: Path) -> Kind:
    if not path.exists():
        return "megatron"
    if path.is_file():
        if path.suffix == ".json":
            raise ValueError(
                f"data: {path} could be one text or one JSON object a line; say which with --data.format "
                "text or --data.format jsonl"
            )
        return _suffix_kind(path) or "text"
    if readers.is_datasets_folder(path):
        return "datasets"
    # .bin says little without its .idx
    kinds = {
        kind for file in _walk(path) if file.suffix != ".bin" and (kind := _suffix_kind(file)) is not None
    }
    if len(kinds) > 1:
        raise ValueError(
            f"data: {path} holds files of several formats ({', '.join(sorted(kinds))}); name one with "
            "--data.format"
        )
    return kinds.pop() if kinds else "text"
