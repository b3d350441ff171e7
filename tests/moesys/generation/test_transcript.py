from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from moesys.data import Tokenizer, bytes_tokenizer
from moesys.generation.transcript import Transcript

BYTES = bytes_tokenizer()
END = BYTES.eot_id


def started(*prompts: str) -> tuple[Transcript, list[str]]:
    written: list[str] = []
    return Transcript(prompts, [BYTES.encode(p) for p in prompts], BYTES, written.append), written


def test_one_prompt_streams_without_a_heading() -> None:
    transcript, written = started("ab")
    assert written == ["ab"]
    transcript.add(0, ord("c"))
    assert written == ["ab", "c"]
    transcript.add(0, END)
    assert "".join(written) == "abc\n"


def test_only_whole_characters_are_written() -> None:
    transcript, written = started("größe ")
    for number, byte in enumerate("漢🙂".encode()):
        transcript.add(0, byte)
        assert "".join(written) == "größe " + ("" if number < 2 else "漢" if number < 6 else "漢🙂")


def test_a_character_cut_off_at_the_end_is_marked() -> None:
    transcript, written = started("")
    transcript.add(0, "漢".encode()[0])
    assert written == [""] or written == []
    transcript.finish(0)
    assert "".join(written) == "\N{REPLACEMENT CHARACTER}\n"


def test_a_line_that_is_ended_gets_no_second_end() -> None:
    transcript, written = started("a")
    transcript.add(0, ord("\n"))
    transcript.finish(0)
    transcript.finish(0)
    assert "".join(written) == "a\n"


def test_later_prompts_wait_for_the_first() -> None:
    transcript, written = started("a", "b", "c")
    transcript.add(1, ord("2"))
    transcript.add(2, ord("3"))
    transcript.add(2, END)
    transcript.add(0, ord("1"))
    assert "".join(written) == "== 1 of 3 ==\na1"
    transcript.add(0, END)
    assert "".join(written) == "== 1 of 3 ==\na1\n== 2 of 3 ==\nb2"
    transcript.add(1, ord("2"))
    transcript.finish_all()
    assert "".join(written) == "== 1 of 3 ==\na1\n== 2 of 3 ==\nb22\n== 3 of 3 ==\nc3\n"


def test_a_space_after_the_prompt_is_kept() -> None:
    """Tokenizers of this kind write a space into the next word's entry and drop it at the start of a text."""
    backend = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "▁one": 1, "▁two": 2}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    written: list[str] = []
    transcript = Transcript(["one"], [[1]], Tokenizer(backend, "</s>"), written.append)
    for token in (2, 1, 0):
        transcript.add(0, token)
    assert "".join(written) == "one two one\n"


@given(st.lists(st.text(max_size=6), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_any_interleaving_gives_the_same_text(texts: list[str], random) -> None:
    transcript, written = started(*["p"] * len(texts))
    left = {i: [*text.encode(), END] for i, text in enumerate(texts)}
    while left:
        i = random.choice(list(left))
        transcript.add(i, left[i].pop(0))
        if not left[i]:
            del left[i]
    expected = ""
    for i, text in enumerate(texts):
        body = "p" + text
        expected += f"== {i + 1} of {len(texts)} ==\n{body}" + ("" if body.endswith("\n") else "\n")
    assert "".join(written) == expected
