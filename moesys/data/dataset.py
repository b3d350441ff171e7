"""A stream of tokens made of documents, read through memory maps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenDataset:
    """The documents of one source or split, one after another.

    The project's own cache lays a document out as [end-of-text, t1, ..., tn]. Megatron files are read as they
    are, usually [t1, ..., tn, end-of-text]: there too a document starts at the end-of-text before it, and
    where there is none, at its first token, which is then nobody's label.
    """

    name: str
    """Where it comes from, for messages."""
    tokens: np.ndarray
    """Token ids [any], memory-mapped, of any integer dtype."""
    offsets: np.ndarray
    """int64 [documents + 1]: where each document starts in the stream; the last is the stream's length."""
    origins: np.ndarray | None = None
    """int64 [documents]: where each document starts in tokens; None when the stream is tokens itself."""
    eot_id: int
    token_bytes: np.ndarray
    """int32 [vocabulary]: UTF-8 bytes that each id stands for."""
    document_bytes: np.ndarray | None = None
    """int64 [documents]: UTF-8 bytes of each document's text; None when only the tokens are known."""
    exact_bytes: bool
    """Whether token_bytes is known to add up to every document's bytes."""
    folder: Path | None = None
    """The cache entry it was read from, where things computed from it may be kept."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the stream, end-of-text included."""
        return int(self.offsets[-1])

    @property
    def num_documents(self) -> int:
        """Documents in the stream."""
        return len(self.offsets) - 1

    @property
    def num_bytes(self) -> int | None:
        """UTF-8 bytes of the text; None when only the tokens are known."""
        return None if self.document_bytes is None else int(self.document_bytes.sum())

    def read(self, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]: tokens of the stream. Raises ValueError for an id outside the vocabulary."""
        if self.origins is None:
            tokens = np.asarray(self.tokens[start:stop], dtype=np.int64)
        else:
            tokens = np.concatenate(list(self._gather(start, stop)), dtype=np.int64)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < len(self.token_bytes):
            bad = int(tokens.max() if tokens.min() >= 0 else tokens.min())
            raise ValueError(
                f"{self.name} holds token {bad}, the tokenizer's ids are 0 to {len(self.token_bytes) - 1}; "
                "give the tokenizer that made the file with --data.tokenizer"
            )
        return tokens

    def starts(self, start: int, tokens: np.ndarray) -> np.ndarray:
        """bool [n]: where a document starts among the n tokens that `read` gave from start on."""
        marks = tokens == self.eot_id
        low, high = np.searchsorted(self.offsets, [start, start + len(tokens)])
        bounds = np.asarray(self.offsets[low:high]) - start
        inner = bounds[bounds > 0]
        marks[bounds[bounds == 0]] = True
        marks[inner[tokens[inner - 1] != self.eot_id]] = True
        return marks

    def bytes_before(self, index: int) -> float:
        """UTF-8 bytes of the text of tokens [0, index): a document's bytes, shared evenly over its tokens."""
        if self.document_bytes is None:
            raise AssertionError("the bytes of these documents are not known")
        document = int(np.searchsorted(self.offsets, index, side="right")) - 1
        if document == self.num_documents:
            return float(self._cumulated_bytes[document])
        first, last = (int(offset) for offset in self.offsets[document : document + 2])
        # End-of-text, the first token, stands for no text.
        share = max(0, index - first - 1) / max(1, last - first - 1)
        return float(self._cumulated_bytes[document]) + share * float(self.document_bytes[document])

    @cached_property
    def _cumulated_bytes(self) -> np.ndarray:
        assert self.document_bytes is not None
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.document_bytes)])

    def _gather(self, start: int, stop: int) -> Iterator[np.ndarray]:
        assert self.origins is not None
        document = int(np.searchsorted(self.offsets, start, side="right")) - 1
        yield np.zeros(0, np.int64)
        while start < stop:
            first, last = (int(offset) for offset in self.offsets[document : document + 2])
            origin = int(self.origins[document]) + start - first
            count = min(stop, last) - start
            yield self.tokens[origin : origin + count]
            start, document = start + count, document + 1
