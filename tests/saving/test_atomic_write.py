"""Files are not written over devices, keep their permissions, and can be written by several processes at once."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

import outgrow
from outgrow.errors import CheckpointError
from tests.helpers.small_runs import X, at, mlp, started


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    model = mlp()
    run = started(model, SGD(model.parameters(), lr=0.1), [at(3)])
    for save in (lambda: outgrow.save(model, path), lambda: run.save(path)):
        with pytest.raises(CheckpointError, match="is a device or a pipe"):
            save()
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_permissions_and_a_link_its_target(tmp_path: Path) -> None:
    path, link = tmp_path / "model.safetensors", tmp_path / "latest.safetensors"
    outgrow.save(mlp(), path)
    usual = path.stat().st_mode
    path.chmod(0o600)
    link.symlink_to(path.name)
    outgrow.save(mlp(1), link)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert torch.equal(outgrow.load(mlp(2), path)(X), mlp(1)(X))
    path.unlink()
    outgrow.save(mlp(1), link)  # a dangling link: the file is created at its target
    assert path.stat().st_mode == usual


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may write anywhere")
def test_a_write_protected_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    outgrow.save(mlp(), path)
    path.chmod(0o400)
    with pytest.raises(CheckpointError, match="write-protected"):
        outgrow.save(mlp(1), path)


def test_the_longest_names_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 121 + ".safetensors")
    assert len(os.fsencode(path.name)) == 254
    outgrow.save(mlp(), path)
    outgrow.save(mlp(1), path)
    assert list(tmp_path.iterdir()) == [path]
    assert torch.equal(outgrow.load(mlp(), path)(X), mlp(1)(X))


def test_a_full_disk_is_reported_and_the_old_file_is_kept(tmp_path: Path) -> None:
    model, path, run_path = mlp(), tmp_path / "model.safetensors", tmp_path / "run.pt"
    run = started(model, SGD(model.parameters(), lr=0.1), [at(3)])
    outgrow.save(model, path)
    run.save(run_path)
    before = path.read_bytes(), run_path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for save in (lambda: outgrow.save(mlp(1), path), lambda: run.save(run_path)):
            with pytest.raises(CheckpointError, match="could not be written"):
                save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (path.read_bytes(), run_path.read_bytes()) == before
    assert sorted(tmp_path.iterdir()) == [path, run_path]


SAVING = """
import sys, torch, outgrow
from tests.helpers.small_runs import mlp
model = mlp(int(sys.argv[2]))
for _ in range(25):
    outgrow.save(model, sys.argv[1])
"""


@pytest.mark.exhaustive
def test_processes_that_save_at_once_leave_one_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    outgrow.save(mlp(0), path)
    folder = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    running = [
        subprocess.Popen([sys.executable, "-c", SAVING, str(path), str(seed)], env=environment, cwd=folder) for seed in (0, 1)
    ]
    wanted = [mlp(seed)(X) for seed in (0, 1)]
    while any(process.poll() is None for process in running):
        found = outgrow.load(mlp(2), path)(X)
        assert any(torch.equal(found, one) for one in wanted)
    assert [process.returncode for process in running] == [0, 0]
    assert list(tmp_path.iterdir()) == [path]
