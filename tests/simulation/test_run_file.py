"""The file of a recorded run, and its picture: what is seen of many lost steps."""

from __future__ import annotations

import copy
import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from lossscale import LossScaleMonitor, Run, load_run, save_run

FLAGS = np.array([True, False, True, True])
SCALES = np.array([8, 8, 4, 4], np.float32)


@pytest.mark.parametrize("make", [str, os.fsencode, Path], ids=["str", "bytes", "Path"])
def test_a_run_comes_back_from_a_path_of_every_kind(tmp_path, make):
    path = make(str(tmp_path / "run.npz"))
    save_run(path, FLAGS.tolist(), SCALES)
    run = load_run(path)
    assert run.is_finite.tolist() == FLAGS.tolist()
    assert run.loss_scale.tolist() == SCALES.tolist()
    save_run(path, FLAGS)
    assert load_run(path).loss_scale is None
    assert load_run(path).bad_losses is None
    save_run(path, FLAGS, bad_losses=~FLAGS)
    assert load_run(path).bad_losses.tolist() == (~FLAGS).tolist()
    assert repr(load_run(path)) == "Run(steps=4, skipped=1, bad_losses=1)"
    assert [found.name for found in tmp_path.iterdir()] == ["run.npz"]


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


NO_PATHS = [None, 1, [], {}, np.zeros([2]), "", "a\0b", b""]


@pytest.mark.parametrize("path", NO_PATHS, ids=repr)
def test_what_is_no_path_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = ValueError if isinstance(path, (str, bytes)) else TypeError
    for call in (load_run, lambda path: save_run(path, FLAGS)):
        with pytest.raises(error, match="`path` must be the path of a file, got"):
            call(path)
    assert not list(tmp_path.iterdir())


def test_lists_that_are_no_array_are_refused(tmp_path):
    with pytest.raises(TypeError, match="`is_finite` must"):
        save_run(tmp_path / "run.npz", [[True], True])
    with pytest.raises(TypeError, match="`loss_scale` must"):
        save_run(tmp_path / "run.npz", FLAGS[:2], [[1.0], 2.0])


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ({"finite": FLAGS}, ValueError, "must hold an array \"is_finite\".*'finite'"),
        ({"is_finite": SCALES}, TypeError, "`is_finite` must hold booleans.*float32"),
        ({"is_finite": FLAGS[None]}, ValueError, r"`is_finite`.*\[1, 4\]"),
        ({"is_finite": FLAGS, "loss_scale": SCALES[1:]}, ValueError, r"\[4\].*\[3\]"),
        ({"is_finite": FLAGS, "loss_scale": FLAGS}, TypeError, "`loss_scale`.*bool"),
        ({"is_finite": FLAGS, "bad_losses": SCALES}, TypeError, "`bad_losses`.*bool"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path, arrays, error, words):
    np.savez(tmp_path / "run.npz", **arrays)
    with pytest.raises(error, match=words) as raised:
        load_run(tmp_path / "run.npz")
    assert "run.npz" in str(raised.value)
    if "is_finite" in arrays:
        with pytest.raises(error, match=words):
            save_run(tmp_path / "other.npz", **arrays)


@pytest.mark.parametrize("name", ["loss_scale", "largest"])
@pytest.mark.parametrize("value", [-1.0, np.nan])
def test_numbers_that_no_run_has_are_refused(tmp_path, name, value):
    numbers = np.array([1, np.inf, value, 0], np.float32)
    np.savez(tmp_path / "run.npz", is_finite=FLAGS, **{name: numbers})
    words = rf"run\.npz.*`{name}` must hold no NaN and nothing negative, got {value}\."
    with pytest.raises(ValueError, match=words):
        load_run(tmp_path / "run.npz")


def test_what_is_no_such_file_is_refused(tmp_path):
    np.save(tmp_path / "run.npy", FLAGS)
    with pytest.raises(ValueError, match=r"must be a NumPy \.npz file"):
        load_run(tmp_path / "run.npy")
    with pytest.raises(FileNotFoundError):
        load_run(tmp_path / "nowhere.npz")
    np.savez(tmp_path / "pickled.npz", is_finite=np.array([True, None], object))
    with pytest.raises(ValueError, match="allow_pickle"):
        load_run(tmp_path / "pickled.npz")


def test_a_damaged_file_is_one_error_that_names_it(tmp_path, rng):
    path = tmp_path / "run.npz"
    save_run(path, FLAGS, SCALES, SCALES)
    whole, refused = path.read_bytes(), 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        if rng.random() < 0.2:
            del damaged[rng.integers(len(damaged)) :]
        path.write_bytes(bytes(damaged))
        try:
            run = load_run(path)
        except ValueError as error:
            refused += 1
            assert "run.npz" in str(error)  # noqa: PT017 - many pass
        else:
            assert len(run.is_finite) == 4
    assert refused > 160


@pytest.fixture(params=["save_run", "monitor"])
def write(request):
    """One of the two that write a run to a path."""
    if request.param == "save_run":
        return lambda path: save_run(path, FLAGS)
    return lambda path: LossScaleMonitor(record=path)


def test_a_folder_is_no_run(tmp_path, write):
    none = tmp_path / "none" / "run.npz"
    for path in (tmp_path, f"{tmp_path}/", f"{tmp_path}/new/", none):
        with pytest.raises(ValueError, match="a file in a folder that exists, got"):
            write(path)


def test_what_is_no_run_is_never_overwritten(tmp_path, write):
    path, other = tmp_path / "thesis.txt", tmp_path / "weights.npz"
    path.write_text("all of it")
    np.savez(other, weights=FLAGS)
    for file in (path, other):
        before = file.read_bytes()
        with pytest.raises(ValueError, match="must be a new file or a recorded run"):
            write(file)
        assert file.read_bytes() == before
    path.write_text("")  # as tempfile makes them
    save_run(path, FLAGS)
    write(path)
    assert load_run(path).is_finite.tolist() == FLAGS.tolist()


class TestRun:
    """The object: what it shows and draws."""

    def test_keeps_the_largest_when_it_is_changed(self):
        run = dataclasses.replace(Run(FLAGS, SCALES, SCALES), is_finite=~FLAGS)
        assert run.largest is SCALES
        assert dataclasses.replace(run, largest=None).largest is None
        assert copy.deepcopy(run).largest.tolist() == SCALES.tolist()
        with pytest.raises(dataclasses.FrozenInstanceError):
            run.largest = None

    def test_shows_all_that_it_holds(self):
        shown = repr(Run(FLAGS, SCALES, SCALES * 2**10))
        assert "steps=4, skipped=1, loss_scale=4 to 8, largest=2**12 to 2**1" in shown

    def test_draws_what_float16_would_hold(self):
        largest = np.array([2.0, np.inf, 0.0, 4.0], np.float32)
        ax = Run(FLAGS, SCALES, largest).plot()
        limit, scale, lost = ax.get_lines()
        np.testing.assert_array_equal(
            limit.get_ydata(), [32752.0, np.nan, np.nan, 16376.0]
        )
        assert scale.get_ydata().tolist() == [8, 8, 4, 4, 4]
        assert lost.get_xdata().tolist() == [1]
        assert "65504 / largest" in limit.get_label()
        assert ax.get_yscale() == "log"
        assert Run(FLAGS).plot(ax) is ax
        assert ax.get_lines()[-1].get_xdata().tolist() == [1]
