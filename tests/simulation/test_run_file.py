"""The file of a recorded run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from lossscale import load_run, save_run

FLAGS = np.array([True, False, True, True])
SCALES = np.array([8, 8, 4, 4], np.float32)


def test_a_run_comes_back(tmp_path):
    path = tmp_path / "run.npz"
    save_run(path, FLAGS, SCALES)
    is_finite, loss_scale = load_run(str(path))
    assert is_finite.dtype == np.bool_
    assert loss_scale.dtype == np.float32
    assert is_finite.tolist() == FLAGS.tolist()
    assert loss_scale.tolist() == SCALES.tolist()


def test_a_run_without_scales_comes_back(tmp_path):
    save_run(tmp_path / "run.npz", FLAGS.tolist())
    run = load_run(tmp_path / "run.npz")
    assert run.is_finite.tolist() == FLAGS.tolist()
    assert run.loss_scale is None


def test_the_format_is_numpys_own(tmp_path):
    save_run(tmp_path / "ours", FLAGS, SCALES)
    with np.load(tmp_path / "ours", allow_pickle=False) as found:
        kinds = {key: (found[key].dtype, found[key].shape) for key in found}
    assert kinds == {"is_finite": (bool, (4,)), "loss_scale": (np.float32, (4,))}
    np.savez(tmp_path / "theirs.npz", is_finite=FLAGS, epoch=3)
    assert load_run(tmp_path / "theirs.npz").is_finite.tolist() == FLAGS.tolist()


def test_a_run_that_dies_while_saving_leaves_the_last_one(tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    save_run(path, FLAGS)

    def dies(file, **_):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", dies)
    with pytest.raises(KeyboardInterrupt):
        save_run(path, ~FLAGS)
    assert load_run(path).is_finite.tolist() == FLAGS.tolist()


def test_nothing_is_unpickled(tmp_path):
    path = tmp_path / "run.npz"
    np.savez(path, is_finite=np.array([True, None], object))
    with pytest.raises(ValueError, match="allow_pickle"):
        load_run(path)


@pytest.mark.parametrize("make", [str, os.fsencode, Path], ids=["str", "bytes", "Path"])
def test_paths_of_every_kind(tmp_path, make):
    path = make(str(tmp_path / "run.npz"))
    save_run(path, FLAGS)
    assert load_run(path).is_finite.tolist() == FLAGS.tolist()
    assert [found.name for found in tmp_path.iterdir()] == ["run.npz"]


@pytest.mark.parametrize("path", [None, 1, [], {}, np.zeros([2])], ids=repr)
def test_what_is_no_path_is_refused(path):
    for call in (load_run, lambda path: save_run(path, FLAGS)):
        with pytest.raises(TypeError, match="`path` must be the path of a file, got"):
            call(path)


@pytest.mark.parametrize("path", ["", "a\0b", b""], ids=repr)
def test_paths_that_no_file_can_have_are_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (load_run, lambda path: save_run(path, FLAGS)):
        with pytest.raises(ValueError, match="`path` must be the path of a file, got"):
            call(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [[[True], True], [[1.0], 2.0]], ids=str)
def test_lists_that_are_no_array_are_refused(tmp_path, value):
    with pytest.raises(TypeError, match="`is_finite` must"):
        save_run(tmp_path / "run.npz", value)
    with pytest.raises(TypeError, match="`loss_scale` must"):
        save_run(tmp_path / "run.npz", FLAGS[:2], value)


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ({"finite": FLAGS}, ValueError, "must hold an array \"is_finite\".*'finite'"),
        ({"is_finite": SCALES}, TypeError, "`is_finite` must hold booleans.*float32"),
        ({"is_finite": FLAGS[None]}, ValueError, r"`is_finite`.*\[1, 4\]"),
        ({"is_finite": FLAGS, "loss_scale": SCALES[1:]}, ValueError, "4, got 3"),
        ({"is_finite": FLAGS, "loss_scale": FLAGS}, TypeError, "`loss_scale`.*bool"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path, arrays, error, words):
    np.savez(tmp_path / "run.npz", **arrays)
    with pytest.raises(error, match=words):
        load_run(tmp_path / "run.npz")
    if "is_finite" in arrays:
        with pytest.raises(error, match=words):
            save_run(tmp_path / "other.npz", **arrays)


def test_what_is_no_such_file_is_refused(tmp_path):
    np.save(tmp_path / "run.npy", FLAGS)
    with pytest.raises(ValueError, match=r"must be a NumPy \.npz file"):
        load_run(tmp_path / "run.npy")
    with pytest.raises(FileNotFoundError):
        load_run(tmp_path / "nowhere.npz")
