from __future__ import annotations

import gzip
import json
import os
import sys
import sysconfig
from hashlib import blake2b

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesys.data import readers
from moesys.data.corpus import find_source
from moesys.data.split import is_held_out

ROWS = ["first text", "zweiter Text: größer", "", "third\nwith lines\n"]


def read(source: str | os.PathLike, **options) -> dict[str, str]:
    """Documents of a source by name, their pieces joined."""
    documents: dict[str, str] = {}
    for piece in find_source(str(source), **options).pieces():
        assert piece.first == (piece.name not in documents)
        documents[piece.name] = documents.get(piece.name, "") + piece.text
    return documents


def texts(source: str | os.PathLike, **options) -> list[str]:
    return [piece.text for piece in find_source(str(source), **options).pieces()]


def test_stdlib_takes_python_files_and_leaves_out_the_rest(tmp_path, monkeypatch):
    files = {
        "os.py": b"import sys\n",
        "json/__init__.py": "# größer\n".encode(),
        "test/test_os.py": b"pass\n",
        "json/tests/test_json.py": b"pass\n",
        "empty.py": b"",
        "latin.py": b"# gr\xf6\xdfer\n",
        "data.txt": b"no code",
        "site-packages/x.py": b"x",
        "dist-packages/x.py": b"x",
        "json/__pycache__/x.py": b"x",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert list(read("stdlib").items()) == [
        ("json/__init__.py", "# größer\n"),
        ("os.py", "import sys\n"),
    ]


def test_the_real_stdlib_is_found():
    source = find_source("stdlib")
    names = [source.name_of(file) for file in source.files]
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert not [name for name in names if "site-packages" in name or not name.endswith(".py")]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert source.title == f"standard library of Python {version}"


def test_a_text_file_is_one_document_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes("ä\r\nb\n".encode())
    assert read(tmp_path / "a.txt") == {"a.txt": "ä\r\nb\n"}


def test_a_folder_of_texts_is_read_recursively(tmp_path):
    for name in ("b.md", "sub/deep/a.txt", "a", ".hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "nothing.txt").write_text("")
    assert read(tmp_path) == {"a": "a", "b.md": "b.md", "sub/deep/a.txt": "sub/deep/a.txt"}


@pytest.mark.parametrize("text", ["äöü😀" * 50, "ab\ncd äö\n" * 30, "x" * 64, "", "y" * 16 + "\n" + "z" * 15])
def test_a_long_text_file_comes_in_pieces(tmp_path, monkeypatch, text):
    monkeypatch.setattr(readers, "PIECE_BYTES", 16)
    (tmp_path / "a.txt").write_text(text, newline="")
    pieces = texts(tmp_path / "a.txt")
    assert "".join(pieces) == text
    assert all(len(piece.encode()) <= 32 for piece in pieces)
    assert read(tmp_path / "a.txt") == ({"a.txt": text} if text else {})


@pytest.mark.parametrize("form", ["file", "gz", "folder", "bom", "json"])
def test_json_lines(tmp_path, form):
    content = "\n".join(json.dumps({"id": k, "text": text}) for k, text in enumerate(ROWS)) + "\n\n"
    options = {}
    match form:
        case "gz":
            path = tmp_path / "a.jsonl.gz"
            path.write_bytes(gzip.compress(content.encode()))
        case "bom":
            path = tmp_path / "a.jsonl"
            path.write_text(content, encoding="utf-8-sig")
        case "json":
            path, options = tmp_path, {"format": "jsonl"}
            (path / "a.json").write_text(content)
        case _:
            path = tmp_path if form == "folder" else tmp_path / "a.jsonl"
            (tmp_path / "a.jsonl").write_text(content)
            (tmp_path / "README.md").write_text("about")
    assert texts(path, **options) == [text for text in ROWS if text]


def test_a_bin_file_alone_does_not_make_a_folder_megatron(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.bin").write_text("b")
    assert find_source(str(tmp_path)).kind == "text"


def test_rows_are_named_by_their_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    assert list(read(tmp_path / "a.jsonl")) == [blake2b(b"x", digest_size=16).hexdigest()]


def test_parquet(tmp_path):
    table = pa.table({"n": [1, 2, 3, 4, 5], "body": [*ROWS, None]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(table.slice(0, 1), tmp_path / "b.parquet")
    assert texts(tmp_path / "a.parquet", text_field="body") == [text for text in ROWS if text]
    assert texts(tmp_path, text_field="body") == [*(text for text in ROWS if text), ROWS[0]]


def test_datasets_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ROWS, "n": [1, 2, 3, 4]})
    data.with_format("numpy").save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data.select([1, 0]), "test": data.select([3])}).save_to_disk(
        str(tmp_path / "many")
    )
    datasets.DatasetDict({"test": data}).save_to_disk(str(tmp_path / "no_train"))
    assert texts(tmp_path / "one") == [text for text in ROWS if text]
    assert texts(tmp_path / "many") == [ROWS[1], ROWS[0]]
    assert texts(tmp_path / "many" / "test") == [ROWS[3]]
    with pytest.raises(ValueError, match="no split 'train'; give the folder of one of its splits: test"):
        texts(tmp_path / "no_train")
    with pytest.raises(ValueError, match=r"no field 'body'; fields there: text, n; .*--data.text-field"):
        texts(tmp_path / "one", text_field="body")
    with pytest.raises(ValueError, match="give a folder that save_to_disk wrote"):
        texts(tmp_path, format="datasets")


def test_datasets_package_missing(tmp_path, monkeypatch):
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'moesys\[datasets\]'"):
        texts(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"text": "a"}\n{"body": "b", "n": 1}\n',
            r"line 2: no field 'text'; fields there: body, n; name one",
        ),
        ('{"text": "a"}\n\n{"text": 5}\n', r"line 3: field 'text' holds int, not text; name another with"),
        ('{"text": "a"}\nplain words\n', r"line 2: not JSON .*--data.format text"),
        ("[1]\n", r"line 1: expected a JSON object, got list"),
        (
            '{"text": "\\ud83d"}\n',
            r"line 1: field 'text' holds half a surrogate pair \(\\ud83d\) at character 0",
        ),
    ],
)
def test_errors_in_json_lines_name_the_place(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"a\.jsonl, " + message):
        texts(tmp_path / "a.jsonl")


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not UTF-8 at byte 10"):
        texts(tmp_path / "a.jsonl")
    whole = gzip.compress("\n".join(json.dumps({"text": str(k)}) for k in range(5000)).encode())
    (tmp_path / "b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz is damaged after line \d+: .*; fetch it again"):
        texts(tmp_path / "b.jsonl.gz")
    (tmp_path / "c.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ValueError, match=r"c\.jsonl\.gz is damaged after line 0"):
        texts(tmp_path / "c.jsonl.gz")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ValueError, match=r"d\.parquet is not a whole Parquet file"):
        texts(tmp_path / "d.parquet")
    (tmp_path / "e.txt").write_bytes(b"fine \xff")
    with pytest.raises(ValueError, match=r"e\.txt is not UTF-8: byte 0xff at offset 5; convert it"):
        texts(tmp_path / "e.txt")


def test_errors_in_parquet_name_the_place(tmp_path):
    pq.write_table(pa.table({"a": ["x"], "b": [b"y"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: no field 'text'; fields there: a, b"):
        texts(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, row 0: field 'b' holds bytes, not text"):
        texts(tmp_path / "a.parquet", text_field="b")


def test_invalid_text_late_in_a_long_file(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_BYTES", 16)
    (tmp_path / "a.txt").write_bytes(b"0123456789\n" * 4 + b"ab\xc3")
    with pytest.raises(ValueError, match=r"byte 0xc3 at offset 46"):
        texts(tmp_path / "a.txt")


def test_what_cannot_be_told_is_asked(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing at .*missing; give 'stdlib', a file or folder"):
        find_source(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"no text files in .*; check the path"):
        find_source(str(tmp_path))
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"say which with --data\.format text or --data\.format jsonl"):
        find_source(str(tmp_path / "x.json"))
    assert find_source(str(tmp_path / "x.json"), format="text").kind == "text"
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.parquet").write_text("")
    with pytest.raises(ValueError, match=r"several formats \(jsonl, parquet\); name one with --data\.format"):
        find_source(str(tmp_path))
    with pytest.raises(ValueError, match="is a file; a datasets source is the folder"):
        find_source(str(tmp_path / "a.jsonl"), format="datasets")


def test_identity_changes_with_the_files(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    os.utime(file, ns=(0, 10**18))
    before = find_source(str(tmp_path)).identity()
    assert before == find_source(str(tmp_path)).identity()
    file.write_text("longer")
    os.utime(file, ns=(0, 10**18))
    longer = find_source(str(tmp_path)).identity()
    os.utime(file, ns=(0, 10**18 + 1))
    later = find_source(str(tmp_path)).identity()
    (tmp_path / "b.txt").write_text("")
    more = find_source(str(tmp_path)).identity()
    other_field = find_source(str(tmp_path), text_field="body").identity()
    assert len({json.dumps(x) for x in (before, longer, later, more, other_field)}) == 5


def test_held_out_share_is_near_what_was_asked_and_keyed_by_name_alone():
    names = [f"folder/{k}.txt" for k in range(20_000)]
    held_out = {name for name in names if is_held_out(name, 0.05)}
    assert 850 < len(held_out) < 1150  # expected 1000, std 31
    assert held_out <= {name for name in names if is_held_out(name, 0.06)}
    assert not any(is_held_out(name, 0.0) for name in names) and all(is_held_out(name, 1.0) for name in names)
