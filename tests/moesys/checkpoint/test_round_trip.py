"""What is saved is what is loaded: dtypes, shapes, views, copies, and the checks before loading."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from moesys.checkpoint import Checkpointer, list_checkpoints, load, load_newest, read_tensors
from moesys.checkpoint import saver as saver_module

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def save(folder: Path, tensors: dict, state: dict | None = None, step: int = 1) -> Path:
    checkpointer = Checkpointer(folder, keep=2, asynchronous=False)
    checkpointer.save(step, tensors, state or {})
    checkpointer.close()
    return list_checkpoints(folder)[0]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


names = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=6)
tensor_specs = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4))
states = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    specs=st.dictionaries(st.lists(names, min_size=1, max_size=3).map("/".join), tensor_specs, max_size=6),
    state=st.dictionaries(st.text(), states, max_size=3),
    seed=st.integers(0, 2**31),
    asynchronous=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_round_trip(tmp_path_factory, specs, state, seed, asynchronous):
    """Every bit pattern of every dtype (NaN payloads too) and any JSON come back."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (dtype, shape) in specs.items():
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        raw = raw % 2 if dtype == torch.bool else raw
        tensors[name] = raw.reshape(-1).view(dtype).reshape(shape)
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpointer = Checkpointer(folder, keep=1, asynchronous=asynchronous)
    checkpointer.save(7, tensors, state)
    checkpointer.close()
    (path,) = list_checkpoints(folder)
    targets = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    assert load(path, targets) == state
    for name, tensor in tensors.items():
        assert same_bytes(targets[name], tensor), name


def test_views_parameters_and_tied_tensors(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    parameter = torch.nn.Parameter(base.clone())
    tensors = {
        "model/transposed": base.t(),
        "model/strided": base[1::2, ::3],
        "model/expanded": torch.ones(1).expand(3),
        "model/parameter": parameter,
        "model/tied": parameter,
        "scalar": torch.tensor(2.5),
    }
    path = save(tmp_path, tensors)
    for name, tensor in read_tensors(path).items():
        assert torch.equal(tensor, tensors[name]) and tensor.shape == tensors[name].shape

    wide = torch.zeros(6, 8)
    targets = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    targets["model/transposed"] = wide.t()[:6, :4]  # a view is filled where it is
    targets["model/parameter"] = torch.nn.Parameter(torch.zeros(4, 6))
    address = targets["model/parameter"].data_ptr()
    load(path, targets)
    assert torch.equal(wide[:4, :6], base) and wide[4:].eq(0).all() and wide[:, 6:].eq(0).all()
    assert targets["model/parameter"].data_ptr() == address
    assert torch.equal(targets["model/parameter"], base) and targets["model/parameter"].requires_grad


def test_files_are_plain_safetensors(tmp_path):
    """One file for each first part of the names, readable by anyone."""
    tensors = {"model/a": torch.randn(3), "model/b": torch.arange(4), "optimizer/a": torch.randn(2)}
    path = save(tmp_path, tensors, {"step": 1})
    assert {p.name for p in path.iterdir()} == {
        "model-00000.safetensors",
        "optimizer-00000.safetensors",
        "index.json",
        "state.json",
        "checksums.json",
    }
    model = load_file(path / "model-00000.safetensors")
    assert model.keys() == {"model/a", "model/b"}
    assert torch.equal(model["model/a"], tensors["model/a"]) and torch.equal(
        model["model/b"], tensors["model/b"]
    )
    assert json.loads((path / "state.json").read_text()) == {"step": 1}


def test_two_parts_of_a_tensor_on_one_rank(tmp_path, monkeypatch):
    """As some shardings give; PyTorch's own safetensors storage keeps only the last."""
    whole = torch.arange(15.0).reshape(5, 3)

    class Halves(saver_module.Planner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            (item,) = plan.items
            halves = []
            for start, size in ((0, 2), (2, 3)):
                chunk = ChunkStorageMetadata(offsets=torch.Size((start, 0)), sizes=torch.Size((size, 3)))
                halves.append(
                    dataclasses.replace(
                        item,
                        type=WriteItemType.SHARD,
                        index=MetadataIndex("model/w", chunk.offsets),
                        tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
                    )
                )
            return dataclasses.replace(plan, items=halves)

        def resolve_data(self, write_item):
            chunk = write_item.tensor_data.chunk
            return whole[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]

    monkeypatch.setattr(saver_module, "Planner", Halves)
    path = save(tmp_path, {"model/w": whole})
    assert load_file(path / "model-00000.safetensors").keys() == {"model/w[0:2,0:3]", "model/w[2:5,0:3]"}
    assert torch.equal(read_tensors(path)["model/w"], whole)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_may_change_right_after_save(tmp_path, asynchronous):
    checkpointer = Checkpointer(tmp_path, keep=3, asynchronous=asynchronous)
    weight, state = torch.zeros(1_000_000), {"step": 0, "seen": []}
    for step in (1, 2, 3):
        weight.fill_(step)
        state["step"] = step
        state["seen"].append(step)
        checkpointer.save(step, {"model/w": weight, "model/view": weight[10:20].view(2, 5)}, state)
        weight.fill_(-1)
        state["step"] = -1
    checkpointer.close()
    for step, path in zip((3, 2, 1), list_checkpoints(tmp_path), strict=True):
        target = {"model/w": torch.zeros(1_000_000), "model/view": torch.zeros(2, 5)}
        assert load(path, target) == {"step": step, "seen": list(range(1, step + 1))}
        assert all(tensor.eq(step).all() for tensor in target.values())


def test_all_mismatches_are_named_at_once_and_nothing_is_modified(tmp_path):
    saved = {"a": torch.ones(2, 3), "b": torch.ones(4), "gone": torch.ones(1), "same": torch.ones(5)}
    path = save(tmp_path, saved)
    targets = {
        "a": torch.zeros(3, 2),
        "b": torch.zeros(4, dtype=torch.float64),
        "extra": torch.zeros(1),
        "same": torch.zeros(5),
    }
    for read in (lambda: load(path, targets), lambda: load_newest(tmp_path, targets)):
        with pytest.raises(ValueError) as caught:
            read()
        text = str(caught.value)
        assert str(path) in text
        assert "missing in the checkpoint: extra" in text and "unexpected in the checkpoint: gone" in text
        assert "a has shape [2, 3] there and [3, 2] here" in text
        assert "b has dtype torch.float32 there and torch.float64 here" in text
        assert "same" not in text
    assert not any(tensor.any() for tensor in targets.values())
    with pytest.raises(ValueError, match="meta"):
        load(path, {name: tensor.to("meta") for name, tensor in saved.items()})


def test_read_tensors_by_prefix_and_name(tmp_path):
    tensors = {"model/a": torch.ones(2), "model/b": torch.ones(3), "optimizer/a": torch.ones(4)}
    path = save(tmp_path, tensors)
    assert read_tensors(path, prefix="model/").keys() == {"model/a", "model/b"}
    assert read_tensors(path, names=["model/b", "optimizer/a"]).keys() == {"model/b", "optimizer/a"}
    with pytest.raises(ValueError, match="has no tensors model/c"):
        read_tensors(path, names=["model/a", "model/c"])
    with pytest.raises(ValueError, match="'modle/'"):
        read_tensors(path, prefix="modle/")
    # Damage in what is not asked for does not matter, damage in what is does.
    (path / "optimizer-00000.safetensors").write_bytes(b"")
    assert torch.equal(read_tensors(path, prefix="model/")["model/b"], torch.ones(3))
    with pytest.raises(ValueError, match=r"damaged: optimizer-00000\.safetensors has 0 bytes"):
        read_tensors(path)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"x": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"x": torch.ones(2, device="meta")}, "meta"),
        ({"x": torch.eye(2).to_sparse()}, "sparse"),
        ({"__metadata__": torch.ones(2)}, "__metadata__"),
        ({"": torch.ones(2)}, "''"),
        ({"\ud800": torch.ones(2)}, "ud800"),
    ],
)
def test_tensors_that_cannot_be_stored_are_refused(tmp_path, tensors, named):
    with pytest.raises(ValueError, match=named):
        save(tmp_path, tensors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "state",
    [
        {"x": float("nan")},
        {"x": [float("inf")]},
        {"x": (1, 2)},
        {1: "x"},
        {"x": {2}},
        {"x": torch.ones(1)},
        {"x": b""},
    ],
)
def test_state_that_is_not_json_is_refused(tmp_path, state):
    with pytest.raises(ValueError, match="plain JSON"):
        save(tmp_path, {"x": torch.ones(2)}, state)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    """Pickles in the folder, under every name that PyTorch's own storages would read, are left alone."""
    fired = tmp_path / "fired"
    path = save(tmp_path / "checkpoints", {"model/w": torch.ones(3)}, {"step": 1})

    class Bomb:
        def __reduce__(self):
            return Path.touch, (fired,)

    for name in (".metadata", "__0.metadata", "__0_0.distcp", "model.pt", "state.pkl", "extra.safetensors"):
        (path / name).write_bytes(pickle.dumps(Bomb()))
    pickle.loads(pickle.dumps(Bomb()))
    assert fired.exists(), "the bomb of this test must work"
    fired.unlink()

    def forbidden(*args, **kwargs):
        raise AssertionError("something was unpickled")

    for target in (
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "torch.load",
        "_pickle.loads",
        "_pickle.load",
    ):
        monkeypatch.setattr(target, forbidden)
    target = {"model/w": torch.zeros(3)}
    assert load_newest(tmp_path / "checkpoints", target) == (path, {"step": 1}, [])
    assert target["model/w"].eq(1).all() and read_tensors(path)["model/w"].eq(1).all()
    assert not fired.exists()


def test_package_has_no_unpickling_in_it():
    import moesys.checkpoint

    (folder,) = moesys.checkpoint.__path__
    for file in Path(folder).glob("*.py"):
        assert not re.search(r"import pickle|torch\.load|FileSystemReader|yaml|eval\(", file.read_text()), (
            file
        )


@pytest.mark.parametrize("step", [0, 1, 99_999_999, 100_000_000, 123_456_789_012])
def test_steps_of_any_length(tmp_path, step):
    path = save(tmp_path, {"x": torch.ones(1)}, step=step)
    assert int(path.name.removeprefix("step-")) == step
    with pytest.raises(ValueError, match="negative"):
        save(tmp_path, {"x": torch.ones(1)}, step=-1)
