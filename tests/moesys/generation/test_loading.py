from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moesys.checkpoint import Checkpointer, read_tensors
from moesys.loading import choose_device, load_run


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def damage(run: Path, step: int, file: str = "model-00000.safetensors") -> None:
    path = run / "checkpoints" / f"step-{step:08d}" / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def rewrite(run: Path, change) -> None:
    """Write the tensors of the newest checkpoint anew as one of step 8, changed."""
    tensors = read_tensors(run / "checkpoints" / "step-00000006")
    change(tensors)
    saver = Checkpointer(run / "checkpoints", keep=9, asynchronous=False)
    saver.save(8, tensors, {"step": 8})
    saver.close()


def test_every_tensor_is_the_one_on_disk(run: Path) -> None:
    loaded = load_run(run)
    path = run / "checkpoints" / "step-00000006" / "model-00000.safetensors"
    stored = {name.removeprefix("model/"): tensor for name, tensor in load_file(path).items()}
    state = loaded.model.state_dict()
    assert loaded.step == 6 and loaded.skipped == ()
    assert state.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(state[name], tensor), name
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_the_model_computes_what_training_computed(run: Path) -> None:
    """The buffers too: a router bias that stayed at zero would show here only through `state_dict`."""
    biases = [b for name, b in load_run(run).model.named_buffers() if name.endswith("router.bias")]
    assert biases and all(bias.abs().max() > 0 for bias in biases)


def test_a_step_can_be_chosen(run: Path) -> None:
    early, late = load_run(run, checkpoint=2), load_run(run, checkpoint=6)
    assert (early.step, late.step) == (2, 6)
    assert not torch.equal(early.model.embedding, late.model.embedding)


def test_a_step_that_is_not_there_names_those_that_are(run: Path) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint of step 3; it has those of step 2, 4, 6"):
        load_run(run, checkpoint=3)


def test_dtypes(run: Path) -> None:
    assert load_run(run).model.embedding.dtype == torch.float32
    wide = load_run(run, dtype=torch.float64).model
    assert {t.dtype for t in wide.state_dict().values()} == {torch.float64}
    narrow = load_run(run, dtype=torch.bfloat16).model
    for name, tensor in narrow.state_dict().items():
        assert tensor.dtype == (torch.float32 if ".router." in name else torch.bfloat16), name


def test_a_damaged_checkpoint_is_skipped_and_named(copy: Path) -> None:
    damage(copy, 6)
    loaded = load_run(copy)
    assert loaded.step == 4
    assert (
        len(loaded.skipped) == 1 and "step-00000006" in loaded.skipped[0] and "checksum" in loaded.skipped[0]
    )


def test_a_damaged_optimizer_does_not_matter(copy: Path) -> None:
    damage(copy, 6, "optimizer-00000.safetensors")
    assert load_run(copy).step == 6


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(copy: Path) -> None:
    damage(copy, 6)
    with pytest.raises(ValueError, match=r"step-00000006 is damaged"):
        load_run(copy, checkpoint=6)


def test_no_usable_checkpoint(copy: Path) -> None:
    for step in (2, 4, 6):
        damage(copy, step)
    with pytest.raises(ValueError, match=r"no usable checkpoint.*step-00000006.*step-00000002"):
        load_run(copy)


def test_no_checkpoint_yet(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(ValueError, match=r"no checkpoint yet; .*--resume"):
        load_run(copy)


@pytest.mark.parametrize("name", ["absent", "file"])
def test_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        FileNotFoundError, match=r"run folder: a run folder.* holds config.toml, tokenizer.json"
    ):
        load_run(tmp_path / name)


def test_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"has no config.toml and no tokenizer.json, so it is not a run folder"
    ):
        load_run(tmp_path)


def test_every_difference_between_model_and_checkpoint_is_told(copy: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model/norm.weight"]
        tensors["model/extra"] = torch.zeros(1)
        tensors["model/embedding"] = torch.zeros(3, 4)

    rewrite(copy, change)
    with pytest.raises(ValueError) as caught:
        load_run(copy)
    text = str(caught.value)
    assert "missing in the checkpoint: norm.weight" in text
    assert "not in the model: extra" in text
    assert "embedding has shape [3, 4] in the checkpoint, [300, 32] in the model" in text


def test_a_missing_buffer_is_told(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.pop("model/blocks.1.feed_forward.router.bias"))
    with pytest.raises(ValueError, match=r"missing in the checkpoint: blocks.1.feed_forward.router.bias"):
        load_run(copy)


def test_another_runs_tokenizer_is_refused(copy: Path) -> None:
    content = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"].append({**content["added_tokens"][0], "id": 300, "content": "<|more|>"})
    (copy / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"has 301 entries, the model 300"):
        load_run(copy)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == choose_device("cpu").type == "cpu"
    with pytest.raises(ValueError, match="finds no GPU"):
        choose_device("cuda")
