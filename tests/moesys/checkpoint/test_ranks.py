"""Two ranks save and load sharded tensors; the oracle is one process with the whole tensors."""

from __future__ import annotations

import json

import pytest
import torch

from moesys.checkpoint import list_checkpoints, load, read_tensors, verify
from moesys.testing.checkpoints import fail_on_one_rank, load_sharded, save_sharded, sharded_whole
from moesys.testing.processes import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.timeout(120),
]
MODULES = ("moesys.testing.checkpoints",)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_ranks_save_then_one_process_and_two_in_another_layout_load(tmp_path, asynchronous):
    run_ranks(save_sharded, 2, tmp_path, asynchronous, modules=MODULES)
    newest, older = list_checkpoints(tmp_path)
    assert (newest.name, older.name) == ("step-00000002", "step-00000001")
    assert len(list(tmp_path.iterdir())) == 2
    whole = sharded_whole()
    for path, step in ((newest, 2), (older, 1)):
        assert verify(path) is None
        targets = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        assert load(path, targets) == {"step": step}
        for name, tensor in whole.items():
            assert torch.equal(targets[name], tensor) and targets[name].dtype == tensor.dtype, name
    assert read_tensors(newest, prefix="model/").keys() == {
        name for name in whole if name.startswith("model/")
    }
    stored = json.loads((newest / "index.json").read_text())["tensors"]
    assert len(stored["model/uneven"]["parts"]) == 2, "each rank must write its own shard"
    for name in ("model/replicated", "plain", "model/one_row"):
        assert len(stored[name]["parts"]) == 1, "no more than needed must be written"
    run_ranks(load_sharded, 2, tmp_path, modules=MODULES)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_is_an_error_of_both(tmp_path, failing):
    run_ranks(fail_on_one_rank, 2, tmp_path, failing, modules=MODULES)
