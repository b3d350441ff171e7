"""Text to token ids and back.

There is one kind of tokenizer, a `tokenizer.json` of the `tokenizers` library. "bytes" is one too, whose ids
are the byte values, so that a run folder always holds a file that any tool can read.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|endofdocument|>",
    "<｜end▁of▁sentence｜>",
    "<|end▁of▁sentence|>",
    "<eod>",
    "<EOT>",
    "<|im_end|>",
)
SPACE = "▁"
"""How SentencePiece tokenizers write a space in their entries."""


class Tokenizer:
    """A vocabulary with an end-of-text entry. Made by `bytes_tokenizer`, `train_bpe` or `Tokenizer.load`.

    Attributes: vocab_size, one more than the largest id; eot_id, the id that opens every document;
    token_bytes, int32 [vocab_size], UTF-8 bytes of text that each id stands for (0 for special entries);
    byte_level, whether every entry is a string of bytes, which makes the round trip exact for any text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end_of_text: str) -> None:
        backend.no_truncation()
        backend.no_padding()
        # Text that spells out a special entry stays text: only we place end-of-text.
        backend.encode_special_tokens = True
        self._backend = backend
        vocab = backend.get_vocab(with_added_tokens=True)
        self.eot_id = vocab[end_of_text]
        self.vocab_size = max(vocab.values()) + 1
        content = json.loads(backend.to_str())
        self.byte_level = _is_byte_level(content)
        self._entries = _entries(backend, content, self.vocab_size, self.byte_level)
        self.token_bytes = np.array([len(entry) for entry in self._entries], dtype=np.int32)
        self._bytes_only = self.byte_level and _maps_each_byte_to_itself(content)

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without end-of-text or any other special entry."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, on all cores."""
        if self._bytes_only:
            return [list(text.encode()) for text in texts]
        return [
            encoding.ids
            for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special entries have none, and bytes that are not UTF-8 become U+FFFD."""
        if self.byte_level:
            return self.decode_bytes(ids).decode(errors="replace")
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The same as bytes, which a byte-level tokenizer need not cut at whole characters."""
        if self.byte_level:
            # A model may have more rows than the tokenizer has entries; those stand for nothing.
            return b"".join(self._entries[i] for i in ids if i < self.vocab_size)
        return self.decode(ids).encode()

    def stream(self) -> StreamDecoder:
        """A decoder that takes one id at a time."""
        return StreamDecoder(self)

    def to_json(self) -> str:
        """The content of tokenizer.json, the same text for the same tokenizer."""
        return self._backend.to_str()

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json that `load` and the tokenizers library read."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Tokenizer:
        """Read a tokenizer.json.

        Raises FileNotFoundError, or ValueError for a file that is none or that has no end-of-text entry.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"data.tokenizer: no file {path}; give 'bpe', 'bytes' or the path of a tokenizer.json"
            )
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer.json of the tokenizers library: {error}") from error
        name = next((n for n in END_OF_TEXT_NAMES if backend.token_to_id(n) is not None), None)
        if name is None:
            raise ValueError(
                f"{path} has no end-of-text entry (looked for {', '.join(END_OF_TEXT_NAMES)}); add one: "
                f"tokenizers.Tokenizer.from_file(path).add_special_tokens(['{END_OF_TEXT}']), then save it"
            )
        backend.add_special_tokens([name])
        return Tokenizer(backend, name)


class StreamDecoder:
    """Turns ids into text as they come; holds back bytes that do not yet make a whole character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []
        self._shown = ""

    def push(self, token: int) -> str:
        """The text that this id completes, possibly none."""
        if self._tokenizer.byte_level:
            return self._utf8.decode(self._tokenizer.decode_bytes([token]))
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._emit(text)

    def finish(self) -> str:
        """What was held back: a character left incomplete comes out as U+FFFD."""
        if self._tokenizer.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._emit(self._tokenizer.decode(self._ids))

    def _emit(self, text: str) -> str:
        new = text[len(self._shown) :]
        # The last ids stay as context: decoders of this kind treat a first entry differently (leading space).
        self._ids = self._ids[-8:]
        self._shown = self._tokenizer.decode(self._ids)
        return new


def bytes_tokenizer() -> Tokenizer:
    """257 entries: id b is the byte b, id 256 is end-of-text."""
    alphabet = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend, END_OF_TEXT)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with at most vocab_size entries, end-of-text (id 0) included.

    Depends only on the texts as a collection, not on their order. Fewer entries come out when the text holds
    no more pairs to merge. Raises ValueError below 257 entries. Source: Sennrich et al. 2016; the byte level
    is GPT-2's.
    """
    if vocab_size < 257:
        raise ValueError(
            f"a byte-level BPE needs at least 257 entries (256 bytes and end-of-text), model.vocab_size is "
            f"{vocab_size}; raise --model.vocab-size"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(_byte_characters()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, END_OF_TEXT)


@cache
def _byte_characters() -> tuple[str, ...]:
    """The character that stands for each byte in byte-level entries (GPT-2): printable Latin-1 is itself, the
    others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare: Iterator[int] = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(256))


def _parts(node: object) -> Iterator[dict]:
    """A component of tokenizer.json and, where it is a sequence, the components inside it."""
    if isinstance(node, dict):
        yield node
        for key in ("pretokenizers", "decoders", "normalizers"):
            for child in node.get(key) or ():
                yield from _parts(child)


def _is_byte_level(content: dict) -> bool:
    return any(part["type"] == "ByteLevel" for part in _parts(content["decoder"]))


def _maps_each_byte_to_itself(content: dict) -> bool:
    vocab = content["model"].get("vocab")
    return (
        vocab == {character: byte for byte, character in enumerate(_byte_characters())}
        and content["normalizer"] is None
        and len(content["added_tokens"]) == 1
    )


def _entries(backend: tokenizers.Tokenizer, content: dict, vocab_size: int, byte_level: bool) -> list[bytes]:
    """The bytes that each id stands for: nothing for special entries and for ids that are not in use."""
    entries = [b""] * vocab_size
    to_byte = {character: byte for byte, character in enumerate(_byte_characters())}
    for piece, token in backend.get_vocab(with_added_tokens=False).items():
        if not byte_level:
            is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
            entries[token] = bytes([int(piece[3:5], 16)]) if is_byte else piece.replace(SPACE, " ").encode()
        elif all(character in to_byte for character in piece):
            entries[token] = bytes(to_byte[character] for character in piece)
        else:
            entries[token] = piece.encode()
    for added in content["added_tokens"]:
        entries[added["id"]] = b"" if added["special"] else added["content"].encode()
    return entries
