"""What a measurement is made with."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from moesys import machine

MiB = 2**20


def test_matmul_rate_divides_the_flops_by_the_fastest_product(monkeypatch):
    clock = itertools.accumulate([0, 4, 100, 2, 100, 8])  # products take 4, 2 and 8 seconds
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine.matmul_rate(size=16, repeats=3) == 2 * 16**3 / 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can start the mark again")
def test_peak_memory_keeps_what_was_freed_until_it_is_reset():
    machine.reset_peak_memory()
    start = machine.peak_memory()
    big = torch.ones(200 * MiB // 4)
    del big
    assert 190 * MiB < machine.peak_memory() - start < 260 * MiB
    machine.reset_peak_memory()
    assert machine.peak_memory() - start < 50 * MiB


def test_peak_memory_of_a_child_is_its_own():
    """The mark that getrusage reports on Linux would be this process's, carried through fork and exec."""
    big = torch.ones(400 * MiB // 4)
    code = (
        "import sys, importlib.util as u; s = u.spec_from_file_location('machine', sys.argv[1]);"
        "m = u.module_from_spec(s); sys.modules['torch'] = sys; s.loader.exec_module(m); print(m.peak_memory())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, machine.__file__], capture_output=True, text=True, check=True, timeout=60
    )
    assert 0 < int(done.stdout) < 200 * MiB < big.nbytes


def test_description_names_machine_and_versions():
    described = machine.describe_machine()
    assert described["processor"]
    assert described["threads"] == torch.get_num_threads()
    assert described["cores"] >= 1 and described["memory_bytes"] > 100 * MiB
    versions = machine.describe_versions()
    assert versions["torch"].startswith(torch.__version__.split("+")[0])
    assert versions["python"].split(".")[:2] == [str(sys.version_info.major), str(sys.version_info.minor)]


def test_commit_is_none_outside_a_checkout_that_tracks_the_code(monkeypatch, tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    (tmp_path / "machine.py").write_text("")
    assert machine.commit() is None  # the repository is there, the file is not in it
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["add", "machine.py"], [*identity, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    found = machine.commit()
    assert found is not None and len(found) == 40
    (tmp_path / "machine.py").write_text("changed")
    assert machine.commit() == found + "-dirty"
