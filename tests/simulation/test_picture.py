"""The picture of a run: what is seen of many lost steps."""

from __future__ import annotations

import numpy as np
import pytest

from lossscale import DynamicLossScale, simulate
from lossscale.simulation import picture


def made(steps, every):
    """Returns a picture of which every so manieth step was lost, in its second half."""
    lost = np.zeros(steps, bool)
    lost[steps // 2 :: every] = True
    return picture.draw("test", None, np.full(steps, 8.0, np.float32), lost), lost


def test_few_lost_steps_are_marked_each():
    ax, lost = made(1000, 10)
    assert ax.get_lines()[-1].get_xdata().tolist() == np.flatnonzero(lost).tolist()


@pytest.mark.parametrize("every", [1, 4])
def test_of_many_the_density_is_drawn(every):
    ax, lost = made(10**6, every)
    assert all(len(line.get_xdata()) < 1000 for line in ax.get_lines())
    (area,) = ax.collections
    x, height = area.get_paths()[0].vertices.T
    # Nothing in the first half, and as high as the share of those that were lost.
    assert not height[x < 490_000].any()
    assert height.max() == pytest.approx(0.4 / every, rel=0.01)
    label = area.get_label()
    assert label.startswith(f"{lost.sum()} steps lost")
    assert label.endswith(f"up to {1 / every:.0%} of them at a time")


def test_a_simulation_is_drawn_so():
    simulation = simulate(DynamicLossScale(), is_finite=np.arange(10_000) % 3 > 0)
    assert len(simulation.plot().collections) == 1
