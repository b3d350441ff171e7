"""A damaged checkpoint is found, named and skipped."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from moesys.checkpoint import (
    Checkpointer,
    DamagedCheckpointError,
    list_checkpoints,
    load,
    load_newest,
    verify,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FILES = [
    "model-00000.safetensors",
    "optimizer-00000.safetensors",
    "index.json",
    "state.json",
    "checksums.json",
]


def content(step: int) -> dict[str, torch.Tensor]:
    return {
        "model/w": torch.full((50, 3), float(step)),
        "model/b": torch.full((4,), step),
        "optimizer/w": torch.full((50, 3), float(step)),
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    checkpointer = Checkpointer(tmp_path, keep=3, asynchronous=False)
    for step in (1, 2, 3):
        checkpointer.save(step, content(step), {"step": step})
    checkpointer.close()
    assert [verify(path) for path in list_checkpoints(tmp_path)] == [None] * 3
    return tmp_path


def assert_falls_back(folder: Path, step: int, *skipped: str) -> None:
    targets = content(0)
    path, state, messages = load_newest(folder, targets)
    assert (path.name, state) == (f"step-{step:08d}", {"step": step})
    assert all(tensor.eq(step).all() for tensor in targets.values())
    assert len(messages) == len(skipped)
    for message, expected in zip(messages, skipped, strict=True):
        assert expected in message and "skipped" in message


@pytest.mark.parametrize("file", FILES)
def test_missing_file(folder, file):
    path = folder / "step-00000003"
    (path / file).unlink()
    assert verify(path) == f"{file} is missing"
    assert_falls_back(folder, 2, "step-00000003 is damaged and was skipped: " + f"{file} is missing")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("keep", [0.0, 0.5, -1])
def test_truncated_file(folder, file, keep):
    target = folder / "step-00000003" / file
    whole = target.read_bytes()
    target.write_bytes(whole[: int(len(whole) * keep)] if keep >= 0 else whole[:-1])
    reason = verify(target.parent)
    assert reason is not None and file in reason
    if file != "checksums.json":
        assert f"instead of {len(whole)}" in reason
    assert_falls_back(folder, 2, reason)


@pytest.mark.parametrize("file", FILES)
def test_any_flipped_bit_is_found(folder, file):
    """In content, headers, names, sizes and in the checksums themselves."""
    path = folder / "step-00000003"
    whole = (path / file).read_bytes()
    rng = random.Random(file)
    for _ in range(150):
        at, bit = rng.randrange(len(whole)), rng.randrange(8)
        (path / file).write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
        assert verify(path) is not None, (file, at, bit)
    targets = content(0)
    with pytest.raises(
        DamagedCheckpointError, match=r"checkpoint .*step-00000003 is damaged: .*use another one"
    ):
        load(path, targets)
    assert not any(tensor.any() for tensor in targets.values())
    (path / file).write_bytes(whole)
    assert verify(path) is None


def test_longer_file_and_swapped_files(folder):
    path = folder / "step-00000003"
    with (path / "state.json").open("ab") as stream:
        stream.write(b" ")
    assert "state.json has" in str(verify(path))
    shutil.copy(folder / "step-00000001/model-00000.safetensors", folder / "step-00000002")
    assert verify(folder / "step-00000002") == "the checksum of model-00000.safetensors differs"
    assert_falls_back(folder, 1, "state.json has", "the checksum of model-00000.safetensors differs")


def test_newest_damaged_in_every_way_and_none_left(folder):
    (folder / "step-00000003" / "checksums.json").write_text('{"files": []}')
    shutil.rmtree(folder / "step-00000002")
    (folder / "step-00000002").mkdir()
    (folder / "step-00000004").write_text("a file, not a folder")
    assert_falls_back(folder, 1, "checksums.json is malformed", "checksums.json is missing")
    (folder / "step-00000001" / "index.json").unlink()
    with pytest.raises(ValueError) as caught:
        load_newest(folder, content(0))
    for part in (
        "no usable checkpoint",
        "step-00000001",
        "step-00000002",
        "step-00000003",
        "index.json is missing",
    ):
        assert part in str(caught.value)


def test_no_checkpoint_at_all(tmp_path):
    assert list_checkpoints(tmp_path / "nowhere") == []
    assert verify(tmp_path / "nowhere") == "there is no such folder"
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"no usable checkpoint .* holds none"):
            load_newest(folder, {})


def test_unreadable_file(folder, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", broken)
    assert "cannot be read: [Errno 5] Input/output error" in str(verify(folder / "step-00000003"))


def forge(path: Path, change) -> None:
    """Change the index and make the checksums agree, as a hostile or faulty program could."""
    index = json.loads((path / "index.json").read_text())
    change(index)
    (path / "index.json").write_text(json.dumps(index))
    checksums = json.loads((path / "checksums.json").read_text())
    new = (path / "index.json").read_bytes()
    checksums["files"]["index.json"] = {"bytes": len(new), "sha256": hashlib.sha256(new).hexdigest()}
    (path / "checksums.json").write_text(json.dumps(checksums))


def part(index, **values):
    index["tensors"]["model/w"]["parts"][0].update(values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda index: index.update(version=2), "version 2"),
        (lambda index: index.pop("tensors"), "malformed"),
        (lambda index: index["tensors"]["model/w"].update(dtype="F64"), "disagree"),
        (lambda index: index["tensors"]["model/w"].update(dtype="pickle"), "malformed"),
        (lambda index: index["tensors"]["model/w"].update(shape=[50, 4]), "do not make up"),
        (lambda index: index["tensors"]["model/w"].update(parts=[]), "do not make up"),
        (lambda index: part(index, shape=[30, 5]), "do not make up"),
        (lambda index: part(index, offsets=[-1, 0]), "malformed"),
        (lambda index: part(index, key="model/b"), "disagree"),
        (lambda index: part(index, key="nowhere"), "malformed"),
        (lambda index: part(index, file="state.json"), "malformed"),
        (
            lambda index: part(index, file="../step-00000002/model-00000.safetensors"),
            "is not in checksums.json",
        ),
    ],
)
def test_index_that_contradicts_the_files(folder, change, reason):
    path = folder / "step-00000003"
    forge(path, lambda index: None)
    assert verify(path) is None
    forge(path, change)
    assert reason in str(verify(path))
    assert_falls_back(folder, 2, reason)
