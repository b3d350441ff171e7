"""Showing several continuations that grow at the same time as one readable text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesys.data import StreamDecoder, Tokenizer

CONTEXT = 8
"""Tokens of the prompt that the decoder sees: some tokenizers drop a space before the first token."""


class Transcript:
    """Writes each prompt with its continuation, in order: one streams, the later ones wait until it is done.

    Only whole characters are written. With several prompts each stands under a line with its number.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        tokens: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
        write: Callable[[str], None],
    ) -> None:
        """prompts as text and as tokens; write takes the text that is to be shown next."""
        self._end_of_text = tokenizer.eot_id
        self._write = write
        self._decoders = [_after(tokenizer, ids) for ids in tokens]
        self._waiting = list(prompts)
        self._done = [False] * len(prompts)
        self._current = 0
        self._last = "\n"
        self._open()

    def add(self, prompt: int, token: int) -> None:
        """Take the next token of a prompt; end-of-text finishes it."""
        if token == self._end_of_text:
            self.finish(prompt)
        else:
            self._show(prompt, self._decoders[prompt].push(token))

    def finish(self, prompt: int) -> None:
        """No more tokens come for this prompt. A second call changes nothing."""
        if self._done[prompt]:
            return
        self._show(prompt, self._decoders[prompt].finish())
        self._done[prompt] = True
        while self._current < len(self._done) and self._done[self._current]:
            self._close()

    def finish_all(self) -> None:
        """No more tokens come at all."""
        for prompt in range(len(self._done)):
            self.finish(prompt)

    def _show(self, prompt: int, text: str) -> None:
        if prompt != self._current:
            self._waiting[prompt] += text
        elif text:
            self._write(text)
            self._last = text[-1]

    def _open(self) -> None:
        if self._current < len(self._done):
            heading = f"== {self._current + 1} of {len(self._done)} ==\n" if len(self._done) > 1 else ""
            self._show(self._current, heading + self._waiting[self._current])

    def _close(self) -> None:
        if self._last != "\n":
            self._write("\n")
            self._last = "\n"
        self._current += 1
        self._open()


def _after(tokenizer: Tokenizer, prompt: Sequence[int]) -> StreamDecoder:
    decoder = tokenizer.stream()
    for token in prompt[-CONTEXT:]:
        decoder.push(token)
    return decoder
