"""The split of an only document, and the share that an error proposes."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesys.data import readers, split
from moesys.data.readers import Piece
from moesys.data.split import is_held_out, share_that_splits

TEXT = "".join(f"Zeile {k} ist größer 🙂\n" for k in range(200))


def text_of(dataset, tokenizer) -> str:
    stream = dataset.read(0, dataset.num_tokens).tolist()
    assert stream[0] == tokenizer.eot_id
    return tokenizer.decode(stream[1:])


def assert_cut(data, text: str, share: float) -> None:
    train, held_out = (text_of(part, data.tokenizer) for part in (data.train.dataset, data.validation))
    assert train + held_out == text
    assert train.endswith("\n")
    assert len(held_out.encode()) == pytest.approx(share * len(text.encode()), abs=40)
    assert data.train.dataset.num_documents == data.validation.num_documents == 1
    assert data.train.dataset.exact_bytes and data.validation.num_bytes == len(held_out.encode())
    assert data.description.endswith(f" held out: the last {100 * share:.3g}% of its only document")


@pytest.mark.parametrize("piece", [100, 1000, 2**23])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.93])
def test_a_single_text_file(tmp_path, open_source, monkeypatch, piece, share):
    monkeypatch.setattr(readers, "PIECE_BYTES", piece)
    (tmp_path / "a.txt").write_text(TEXT)
    assert_cut(open_source(tmp_path / "a.txt", held_out=share), TEXT, share)


def test_empty_files_beside_it_do_not_count(tmp_path, open_source):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("")
    (folder / "b.txt").write_text(TEXT)
    assert_cut(open_source(folder), TEXT, 0.3)
    (folder / "a.txt").write_text("a second document")
    with pytest.raises(ValueError, match=r"2 document\(s\)"):
        open_source(folder, held_out=1e-9)


def write_json_lines(path: Path) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write('{"text": null}\n' + json.dumps({"text": TEXT}) + "\n\n")


def write_parquet(path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"text": ["", TEXT]}), path)


@pytest.mark.parametrize(("name", "write"), [("a.jsonl.gz", write_json_lines), ("a.parquet", write_parquet)])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_single_row(tmp_path, open_source, name, write, tokenizer):
    write(tmp_path / name)
    data = open_source(tmp_path / name, tokenizer=tokenizer)
    assert_cut(data, TEXT, 0.3)


def test_the_bpe_is_trained_on_the_first_part_only(tmp_path, open_source):
    (tmp_path / "a.txt").write_text("public \n" * 700 + "secret \n" * 300)
    tokenizer = open_source(tmp_path / "a.txt", tokenizer="bpe").tokenizer
    assert len(tokenizer.encode("public")) == 1
    assert len(tokenizer.encode("secret")) > 4


def test_with_held_out_text_of_its_own_nothing_is_cut(tmp_path, open_source):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("held out")
    data = open_source(tmp_path / "a.txt", validation=str(tmp_path / "b.txt"))
    assert text_of(data.train.dataset, data.tokenizer) == TEXT
    assert text_of(data.validation, data.tokenizer) == "held out"
    assert data.description.endswith("held out")


@given(
    text=st.text(st.sampled_from("a\né漢🙂"), min_size=2, max_size=60),
    share=st.floats(0.001, 0.999),
    cuts=st.lists(st.integers(0, 60)),
)
def test_nothing_is_lost_and_a_near_line_start_is_found(text, share, cuts):
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [Piece("name", text[a:b], a == 0) for a, b in pairwise(ends)]
    size = len(text.encode())
    found = list(split._cut_in_two(pieces, size, share))
    sides = {
        part: "".join(piece.text for side, piece in found if side == part) for part in ("train", "held_out")
    }
    assert sides["train"] + sides["held_out"] == text
    assert [part for part, _ in found] == sorted((part for part, _ in found), reverse=True)
    starts = [(part, piece.first) for part, piece in found if piece.first]
    assert starts == [(part, True) for part in ("train", "held_out") if sides[part]]
    assert sides["held_out"]
    target = min(max(round(size * (1 - share)), 1), size - 1)
    cut, room = len(sides["train"].encode()), min(target, size - target) // 2
    assert abs(cut - target) <= max(room, 3)
    if len(pieces) == 1:
        lines = [k + 1 for k, byte in enumerate(text.encode()) if byte == 10]
        before = [line for line in lines if target - room < line <= target]
        assert not before or cut == before[-1]
    ends_with_line = text.encode()[:cut].endswith(b"\n")
    assert ends_with_line or abs(cut - target) < 4


@given(st.sets(st.text(min_size=1), min_size=2, max_size=20), st.floats(1e-6, 0.999))
def test_the_proposed_share_splits(names, share):
    proposed = share_that_splits(names, share)
    assert proposed is not None
    assert {is_held_out(name, proposed) for name in names} == {True, False}
    assert len(str(proposed)) < 8
