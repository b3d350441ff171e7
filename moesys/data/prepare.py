"""From a configuration to tokens ready for training and evaluation."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import tokenizers

from moesys.config import DataConfig
from moesys.data import evaluation, megatron
from moesys.data.cache import TokenWriter, cache_root, cached, progress, read_tokens
from moesys.data.corpus import Source, find_source
from moesys.data.dataset import TokenDataset
from moesys.data.packing import TrainingStream
from moesys.data.readers import Piece
from moesys.data.split import Part, document_names, has_one_document, is_held_out, share_that_splits, split
from moesys.data.tokenizer import Tokenizer, bytes_tokenizer, train_bpe

SAMPLE_CHARS = 8_000_000
"""A BPE is trained on at most this much of the training text, about a second's work."""
SAMPLE_PIECE = 2**16
"""Longer documents are sampled in pieces of this many characters."""
ENCODE_CHARS = 2**22
"""Text that is encoded at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """What a run trains and evaluates on."""

    tokenizer: Tokenizer
    train: TrainingStream
    validation: TokenDataset
    description: str
    """One line for the terminal."""

    def xz_bits_per_byte(self) -> float:
        """What `xz -9` needs for the held-out text (16 MiB of it at most); kept in the cache."""
        return evaluation.dataset_xz_bits_per_byte(self.validation, self.tokenizer)


def open_data(
    data: DataConfig, *, vocab_size: int, sequence_length: int, seed: int, tokenizer: Tokenizer | None = None
) -> Data:
    """Find the text, split it, tokenise it unless the cache has it, and map it into memory.

    A given tokenizer (a resumed run's) is used as it is. Raises FileNotFoundError for a path with nothing
    there, ValueError for text, tokenizer or sizes that do not do, OSError for a cache that cannot be written.
    """
    root = cache_root(data.cache)
    source = find_source(data.source, format=data.format, text_field=data.text_field)
    held_out, share, cut = None, data.held_out, False
    if data.validation:
        held_out = find_source(data.validation, format=data.format, text_field=data.text_field)
        share = 0.0
        _check_apart(source, held_out)
    else:
        cut = _check_share(source, share)
    tokenizer = tokenizer or _tokenizer(data, source, share, vocab_size, root)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} entries, model.vocab_size is {vocab_size}: set "
            f"--model.vocab-size {tokenizer.vocab_size} or more, or choose another --data.tokenizer"
        )
    train = _open(source, tokenizer, root, "train", share)
    validation = _open(held_out or source, tokenizer, root, "held_out", share if held_out is None else 1.0)
    if validation.num_tokens < 2:
        raise ValueError(
            f"the held-out text of {validation.name} has {validation.num_tokens} token(s), and evaluation needs 2: "
            "raise --data.held-out, or give other text with --data.validation PATH"
        )
    stream = TrainingStream(
        dataset=train,
        sequence_length=sequence_length,
        seed=seed,
        cross_document_attention=data.cross_document_attention,
    )
    description = f"{source.title}: {_sizes(train)} to train on; {_sizes(validation)} held out"
    if cut:
        description += f": the last {100 * share:.3g}% of its only document"
    return Data(tokenizer=tokenizer, train=stream, validation=validation, description=description)


def open_text(
    source: str, tokenizer: Tokenizer, *, format: str = "auto", text_field: str = "text", cache: str = ""
) -> TokenDataset:
    """All documents of any source, tokenised, for evaluation. Errors as in open_data."""
    found = find_source(source, format=format, text_field=text_field)
    return _open(found, tokenizer, cache_root(cache), "held_out", 1.0)


def _check_apart(source: Source, held_out: Source) -> None:
    files = {(stat.st_dev, stat.st_ino) for stat in map(Path.stat, source.files)}
    for file in held_out.files:
        stat = file.stat()
        if (stat.st_dev, stat.st_ino) in files:
            raise ValueError(
                f"data.validation: {file} is also among the files of data.source {source.root}; held-out text "
                "must not be trained on, so move it out, or leave data.validation empty to hold out a share"
            )


def _check_share(source: Source, share: float) -> bool:
    """Refuse what can be refused before anything is read; returns whether an only document will be cut in two."""
    if not 0 < share < 1:
        raise ValueError(
            f"data.held_out is a share between 0 and 1, got {share}; or give --data.validation PATH"
        )
    if source.kind == "megatron":
        return len(megatron.open_indexed(source.root).offsets) == 2
    if has_one_document(source):
        return True
    if source.kind in ("stdlib", "text"):  # their names are known before anything is read
        names = document_names(source)
        held_out = sum(is_held_out(name, share) for name in names)
        better = share_that_splits(names, share) if names else None
        hint = f"set --data.held-out {better} for instance" if better else "rename a file"
        _check_parts(source, share, len(names) - held_out, held_out, hint)
    return False


def _check_parts(
    source: Source, share: float, num_train: int, num_held_out: int, hint: str = "change --data.held-out"
) -> None:
    if num_train + num_held_out == 0:
        raise ValueError(f"{source.root} holds no text: every document is empty; check the path")
    if 0 < share < 1 and not (num_train and num_held_out):
        raise ValueError(
            f"{source.root} has {num_train + num_held_out} document(s); data.held_out {share} puts {num_train} into "
            f"training and {num_held_out} into held-out text, and both need at least 1: {hint}, give "
            "held-out text of its own with --data.validation PATH, or cut the text into more files"
        )


def _tokenizer(data: DataConfig, source: Source, share: float, vocab_size: int, root: Path) -> Tokenizer:
    if data.tokenizer == "bytes":
        return bytes_tokenizer()
    if data.tokenizer != "bpe":
        return Tokenizer.load(Path(data.tokenizer).expanduser())
    if source.kind == "megatron":
        raise ValueError(
            f"{source.root} holds token ids, so a tokenizer cannot be trained on it: give the tokenizer.json "
            "that made them with --data.tokenizer, or 'bytes'"
        )

    def build(folder: Path) -> None:
        with progress("Training the tokenizer", _progress_total(source)) as advance:
            texts = sample(_watched(_training_pieces(source, share), advance), SAMPLE_CHARS)
            if not texts:
                _check_parts(source, share, 0, sum(piece.first for piece in source.pieces()))
            train_bpe(texts, vocab_size).save(folder / "tokenizer.json")

    key = [source.identity(), share, vocab_size, SAMPLE_CHARS, SAMPLE_PIECE, tokenizers.__version__]
    return cached(root, "tokenizers", key, build, lambda folder: Tokenizer.load(folder / "tokenizer.json"))


def sample(pieces: Iterable[Piece], limit: int) -> list[str]:
    """At most `limit` characters of the text in one pass, spread evenly.

    Takes pieces by the hash of their names until the limit; the same ones whatever order they come in.
    """
    kept: list[tuple[int, str]] = []
    size, ceiling = 0, 2**64
    part = 0
    for piece in pieces:
        part = 0 if piece.first else part
        for start in range(0, len(piece.text), SAMPLE_PIECE):
            text = piece.text[start : start + SAMPLE_PIECE]
            rank = _rank(piece.name, part)
            part += 1
            if rank >= ceiling:
                continue
            heapq.heappush(kept, (-rank, text))
            size += len(text)
            while size > limit:
                rank, text = heapq.heappop(kept)
                size, ceiling = size - len(text), -rank
    return [text for _, text in sorted(kept, reverse=True)]


def _rank(name: str, part: int) -> int:
    name_bytes = f"{name}/{part}".encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(name_bytes, digest_size=8, person=b"bpe-sample").digest(), "big")


def _training_pieces(source: Source, share: float) -> Iterator[Piece]:
    return (piece for part, piece in split(source, share) if part == "train")


def _watched(pieces: Iterable[Piece], advance: Callable[[int], None]) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        advance(len(piece.text))


def _progress_total(source: Source) -> int | None:
    compressed = source.kind == "parquet" or any(file.suffix == ".gz" for file in source.files)
    return None if compressed else source.num_bytes


def _open(source: Source, tokenizer: Tokenizer, root: Path, part: Part, share: float) -> TokenDataset:
    """One part of the split; share 0 puts every document into "train", share 1 into "held_out"."""
    if source.kind == "megatron":
        return _open_indexed(source, tokenizer, root, part, share)
    digest = blake2b(tokenizer.to_json().encode(), digest_size=16).hexdigest()
    key = [source.identity(), share, digest, tokenizer.eot_id]

    def build(folder: Path) -> None:
        _tokenise(source, tokenizer, share, folder)

    folder = cached(root, "tokens", key, build, _whole)
    entry = read_tokens(folder / part)
    return TokenDataset(
        name=str(source.root),
        tokens=entry.tokens,
        offsets=entry.offsets,
        eot_id=tokenizer.eot_id,
        token_bytes=tokenizer.token_bytes,
        document_bytes=entry.document_bytes,
        exact_bytes=entry.exact_bytes,
        folder=folder / part,
    )


def _whole(folder: Path) -> Path:
    for part in ("train", "held_out"):
        read_tokens(folder / part)
    return folder


def _tokenise(source: Source, tokenizer: Tokenizer, share: float, folder: Path) -> None:
    counts = {"train": 0, "held_out": 0}
    with ExitStack() as stack:
        writers = {
            part: stack.enter_context(
                TokenWriter(folder / part, eot_id=tokenizer.eot_id, token_bytes=tokenizer.token_bytes)
            )
            for part in counts
        }
        advance = stack.enter_context(progress("Tokenising", _progress_total(source)))
        for chunk in _chunks(split(source, share)):
            encoded = tokenizer.encode_batch([piece.text for _, piece in chunk])
            for (part, piece), ids in zip(chunk, encoded, strict=True):
                num_bytes = len(piece.text.encode())
                writers[part].add(ids, num_bytes, first=piece.first)
                counts[part] += piece.first
                advance(num_bytes)
    _check_parts(source, share, counts["train"], counts["held_out"])


def _chunks(pieces: Iterable[tuple[Part, Piece]]) -> Iterator[list[tuple[Part, Piece]]]:
    chunk: list[tuple[Part, Piece]] = []
    size = 0
    for part, piece in pieces:
        chunk.append((part, piece))
        size += len(piece.text)
        if size >= ENCODE_CHARS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _open_indexed(source: Source, tokenizer: Tokenizer, root: Path, part: Part, share: float) -> TokenDataset:
    """Megatron files as they are; a document's name is its number in the file."""
    file = megatron.open_indexed(source.root)
    offsets, origins = file.offsets, None
    if 0 < share < 1 and len(offsets) == 2:
        cut = round(int(offsets[1]) * (1 - share))
        start, stop = (0, cut) if part == "train" else (cut, int(offsets[1]))
        offsets, origins = np.array([0, stop - start]), np.array([start])
    elif 0 < share < 1:
        mask = _held_out_documents(source, root, share, len(offsets) - 1) == (part == "held_out")
        lengths = np.diff(offsets)[mask]
        origins = offsets[:-1][mask]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return TokenDataset(
        name=str(source.root),
        tokens=file.tokens,
        offsets=offsets,
        origins=origins,
        eot_id=tokenizer.eot_id,
        token_bytes=tokenizer.token_bytes,
        exact_bytes=tokenizer.byte_level,
    )


def _held_out_documents(source: Source, root: Path, share: float, num_documents: int) -> np.ndarray:
    def build(folder: Path) -> None:
        flags = np.fromiter((is_held_out(str(k), share) for k in range(num_documents)), bool, num_documents)
        _check_parts(source, share, int((~flags).sum()), int(flags.sum()))
        (folder / "held_out.bin").write_bytes(flags.tobytes())

    def read(folder: Path) -> np.ndarray:
        flags = np.fromfile(folder / "held_out.bin", dtype=bool)
        if len(flags) != num_documents:
            raise ValueError(f"{folder} is not whole")
        return flags

    return cached(root, "splits", [source.identity(), share], build, read)


def _sizes(dataset: TokenDataset) -> str:
    sizes = [f"{dataset.num_documents:,} document{'s' * (dataset.num_documents != 1)}"]
    if dataset.num_bytes is not None:
        kilo = dataset.num_bytes / 1e3
        sizes.append(f"{kilo / 1e3:,.1f} MB" if kilo >= 1e3 else f"{kilo:.1f} kB")
    return ", ".join([*sizes, f"{dataset.num_tokens:,} tokens"])
