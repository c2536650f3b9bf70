"""Draws the pictures of these pages: `python docs/pictures.py`, or those it is given.

`python docs/pictures.py --check` says which files show something else by now.

Each function here draws the picture of its name: `docs/_pictures/NAME.png`, or
`NAME.svg` if it is a drawing: words in boxes, which a phone shows as sharp as its text.

The pictures are in the repository, since a hosting site shows pages as they are there.
Each file says in its metadata what it shows, so that a test can find a picture that is
older than its data, even if another version of matplotlib draws other pixels.
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
import tensorflow as tf
import way
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text
from PIL import Image

import lossscale

HERE = Path(__file__).parent
FOLDER = HERE / "_pictures"

# Two replicas, for the picture of replicas.
_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    _CPU, [tf.config.LogicalDeviceConfiguration()] * 2
)


#: How wide a picture is, in inches, and a phone's column, in pixels.
WIDTH, PHONE = 4.9, 358
#: Letters smaller than this many pixels cannot be read there.
SMALLEST = 11.0

STYLE = {
    "font.size": 11,
    # Also what matplotlib makes smaller or larger by itself.
    "axes.titlesize": 11,
    "legend.fontsize": 11,
    "savefig.dpi": 150,
    "figure.autolayout": True,
    "svg.fonttype": "none",  # text stays text, to be found and read aloud
}


def draw(name: str) -> Any:
    """Returns the figure of a picture."""
    with plt.rc_context(STYLE):
        return PICTURES[name]()


def save(name: str) -> None:
    """Draws a picture into its file."""
    FOLDER.mkdir(exist_ok=True)
    with plt.rc_context(STYLE):
        figure = PICTURES[name]()
        if size_on_a_phone(figure) < SMALLEST:
            raise ValueError(f"{name}: its words cannot be read on a phone")
        about = {"Description": json.dumps(shown(figure))}
        if name in DRAWINGS:
            about["Date"] = None  # so that the same drawing is the same file
            # The ground of the page shows through, light or dark.
            figure.savefig(file_of(name), transparent=True, metadata=about)
        else:
            figure.savefig(file_of(name), metadata=about)
    plt.close(figure)


def size_on_a_phone(figure: Any) -> float:
    """Returns how many pixels high a figure's smallest letters are on a phone."""
    shrinks = min(1.0, PHONE / 96 / figure.get_figwidth())
    written = [each for each in figure.findobj(Text) if each.get_text().strip()]
    return min(each.get_size() for each in written) / 72 * 96 * shrinks


def file_of(name: str) -> Path:
    """Returns where a picture is."""
    return FOLDER / f"{name}.{'svg' if name in DRAWINGS else 'png'}"


def shown_in(path: Path) -> Any:
    """Returns what `shown` said of a picture when it was saved."""
    if path.suffix == ".svg":
        found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text())
        return json.loads(html.unescape(found[1]))
    with Image.open(path) as picture:
        return json.loads(picture.info["Description"])


def old(name: str) -> str:
    """Returns how the file of a picture differs from what it must show, or ""."""
    if not file_of(name).is_file():
        return f"{file_of(name)} is missing"
    there, figure = shown_in(file_of(name)), draw(name)
    here = shown(figure)
    plt.close(figure)
    for words in {*there["words"]} ^ {*here["words"]}:
        return f"{name}: {words!r} is in the file or in the picture, not in both"
    same = [len(there["numbers"]) == len(here["numbers"])]
    for one, other in zip(there["numbers"], here["numbers"]):
        same.append(len(one) == len(other) and np.allclose(one, other, 3e-3, 3e-3))
    return "" if all(same) else f"{name}: shows other numbers than in its file"


def shown(figure: Any) -> Dict[str, Any]:
    """Returns what a figure shows: its words, and a summary of its numbers."""
    words: List[str] = []
    numbers: List[List[float]] = []
    for axes in figure.axes:
        words += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        legend = axes.get_legend()
        words += [text.get_text() for text in legend.get_texts()] if legend else []
        words += [text.get_text() for text in axes.texts]
        numbers += [_summary(line.get_xydata()) for line in axes.lines]
        numbers += [_summary(picture.get_array()) for picture in axes.images]
        bars = [patch for patch in axes.patches if hasattr(patch, "get_xy")]
        boxes = [
            patch.get_bbox().bounds for patch in bars if hasattr(patch, "get_bbox")
        ]
        numbers += [_summary(boxes)] if boxes else []
    return {"words": [word for word in words if word], "numbers": numbers}


def _summary(values: Any) -> List[float]:
    flat = np.asarray(values, float).ravel()
    flat = flat[np.isfinite(flat)]
    if not flat.size:
        return [0.0]
    found = [flat.size, flat.mean(), flat.std(), flat.min(), flat.max()]
    found = list(flat) if flat.size <= 60 else found
    return [float(f"{number:.4g}") for number in found]


def _run(axes: Any, scale: Any, limit: Any, title: str = "", label: str = "") -> None:
    """Draws a loss scale over a limit above which steps overflow."""
    found = lossscale.simulate(scale, limit=limit)
    exponents = np.log2(found.loss_scale)
    (line,) = axes.step(np.arange(len(exponents)), exponents, where="post", label=label)
    bad = np.flatnonzero(~np.asarray(found.is_finite))
    axes.plot(bad, exponents[bad], "x", color=line.get_color(), markersize=6)
    labels = {"xlabel": "step (x: skipped)", "ylabel": "log2 of the loss scale"}
    axes.set(title=title, **labels)


def _limit(steps: int, exponent: float) -> Any:
    """Returns a made-up limit that wanders around 2**exponent, always the same."""
    wandering = np.cumsum(np.random.default_rng(1).normal(0, 0.05, steps))
    return 2.0 ** (exponent + wandering)


def glance() -> Any:
    """Loss scaling at a glance: the README's picture."""
    generator = np.random.default_rng(2)
    exponents = generator.normal(-27, 3.2, 4_000)  # made up, in float32
    figure = plt.figure(figsize=(WIDTH, 6.6), layout="none")
    canvas = figure.add_axes((0, 0, 1, 1), xlim=(0, 1), ylim=(0, 1))
    canvas.axis("off")
    bins = np.arange(-44, 20, 0.5)
    rows = [
        ("gradients of the loss, in float32", exponents),
        ("gradients of S times the loss, in float16, S = 2**15", exponents + 15),
        ("divided by S, in float32", exponents),
    ]
    tops = (0.985, 0.735, 0.485)
    for nth, ((words, values), top) in enumerate(zip(rows, tops)):
        canvas.text(0.03, top, words, va="top")
        axes = figure.add_axes((0.03, top - 0.15, 0.94, 0.115))
        in_float16 = nth < 2
        if in_float16:
            axes.axvspan(-45, -25, color="tab:red", alpha=0.16, linewidth=0)
            axes.axvspan(-25, 16, color="tab:green", alpha=0.13, linewidth=0)
            axes.axvspan(16, 20, color="tab:red", alpha=0.16, linewidth=0)
        lost = values < -25
        axes.hist(values[~lost], bins, color="tab:blue")
        axes.hist(values[lost], bins, color="tab:red" if in_float16 else "tab:blue")
        axes.set(xlim=(-44, 20), yticks=[], xticks=[-40, -25, -10, 0, 16])
        axes.set_ylim(top=axes.get_ylim()[1] * 1.5)
        place = {"transform": axes.get_xaxis_transform(), "va": "top"}
        if in_float16:
            axes.text(-43.5, 0.96, "zero in float16", color="#b02020", **place)
            axes.text(-8, 0.96, "fits in float16", color="darkgreen", **place)
            axes.text(18, 0.96, "inf", color="#b02020", ha="center", **place)
        else:
            axes.text(-8, 0.96, "fits in float32", **place)
            axes.set_xlabel("log2 of a gradient")
    for low, label in ((0.775, "times S"), (0.525, "divided by S")):
        _line(canvas, (0.62, low + 0.02), (0.62, low - 0.018))
        canvas.text(0.65, low, label, va="center", weight="bold")
    boxes = {
        "all finite, on every replica?": (0.2, 0.175, 0.6, "#5b4b9a"),
        "apply the step": (0.06, 0.03, 0.4, "#1f6f5c"),
        "skip, and halve S": (0.54, 0.03, 0.4, "#a8480b"),
    }
    style = {"boxstyle": "round,pad=0,rounding_size=0.015", "linewidth": 0}
    for words, (left, bottom, width, color) in boxes.items():
        box = FancyBboxPatch((left, bottom), width, 0.065, facecolor=color, **style)
        canvas.add_patch(box)
        middle = left + width / 2, bottom + 0.0325
        canvas.text(*middle, words, color="white", ha="center", va="center")
    for where, words in ((0.32, "yes"), (0.68, "no")):
        _line(canvas, (where, 0.175), (where, 0.1))
        canvas.text(where + 0.02, 0.138, words, va="center")
    return figure


def start() -> Any:
    """The rule of DynamicLossScale over a run."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3))
    limit = _limit(400, 18.5)
    _run(axes, lossscale.DynamicLossScale(2.0**15, 30), limit, label="loss scale")
    axes.plot(np.log2(limit), color="tab:red", alpha=0.6, label="above: overflow")
    axes.legend()
    return figure


def choosing() -> Any:
    """Five schedules over one run."""
    figure, axes = plt.subplots(figsize=(WIDTH, 4.8))
    limit = _limit(400, 22)
    scales = {
        "DynamicLossScale(increment_period=30)": lossscale.DynamicLossScale(
            2.0**15, 30
        ),
        "... (search_period=1)": lossscale.DynamicLossScale(
            2.0**15, 30, search_period=1
        ),
        "HeadroomLossScale()": lossscale.HeadroomLossScale(),
        '"contrib", as it was': lossscale.DynamicLossScale.from_preset(
            "contrib", initial_loss_scale=2.0**24, increment_period=30
        ),
        "FixedLossScale(2**17)": lossscale.FixedLossScale(2.0**17, skip_nonfinite=True),
    }
    for name, scale in scales.items():
        _run(axes, scale, limit, label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2))
    return figure


def watching() -> Any:
    """What a healthy run looks like, and three that are not."""
    figure, panels = plt.subplots(4, 1, figsize=(WIDTH, 9))
    scale = lossscale.DynamicLossScale(2.0**24, 40)
    falling = 2.0 ** np.linspace(20, 4, 300)
    _run(panels[0], scale, _limit(300, 18), "well: it tries its limit")
    _run(panels[1], scale, _limit(300, 40), "well: the limit is higher still")
    _run(panels[2], scale, falling, "gradients grow: clip, or a lower rate")
    _run(panels[3], scale, np.zeros(60), "nothing is finite: the scale cannot help")
    return figure


def trouble() -> Any:
    """The search, and a run in which no scale helps."""
    figure, panels = plt.subplots(2, 1, figsize=(WIDTH, 5), sharex=True)
    scale = lossscale.DynamicLossScale(2.0**30, 40)
    _run(panels[0], scale, _limit(60, 18), "the search")
    _run(panels[1], scale, np.zeros(60), "no step is finite")
    return figure


def replicas() -> Any:
    """Which of two replicas overflowed, and what both did."""
    figure, axes = plt.subplots(figsize=(WIDTH, 2.4))
    bad = np.random.default_rng(3).random([40, 2]) < [0.06, 0.1]
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        scale = lossscale.DynamicLossScale(2.0**10)

    @tf.function
    def step(gradient: Any) -> Any:
        apply = scale.update([gradient])[1]
        return tf.cast(apply, tf.int32)

    rows = []
    for flags in bad:
        given = np.where(flags, np.inf, 1.0).astype("float32")
        each = strategy.experimental_distribute_values_from_function(
            lambda c, given=given: tf.constant(given[c.replica_id_in_sync_group])
        )
        both = strategy.experimental_local_results(strategy.run(step, [each]))
        rows.append([*flags, *(1 - int(one) for one in both)])
    rows = np.transpose(rows)
    axes.imshow(rows, aspect="auto", cmap="Reds", vmin=0, vmax=1.5)
    names = [
        f"replica {nth} {what}" for what in ("overflows", "skips") for nth in (0, 1)
    ]
    axes.set_yticks(range(4), names)
    axes.set(xlabel="step")
    return figure


def saving() -> Any:
    """A run, and one that continues from its checkpoint."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3))
    flags = _limit(200, 0) > 2.0 ** np.random.default_rng(5).normal(-2, 1, 200)
    first = lossscale.DynamicLossScale(2.0**15, 20)
    states, path = [], str(FOLDER / "checkpoint")
    for step, flag in enumerate(flags):
        if step == 100:
            saved = tf.train.Checkpoint(scale=first).write(path)
        states.append(np.log2(float(first)))
        first.adjust(bool(flag))
    second = lossscale.DynamicLossScale(2.0**15, 20)
    tf.train.Checkpoint(scale=second).read(saved)
    again = []
    for flag in flags[100:]:
        again.append(np.log2(float(second)))
        second.adjust(bool(flag))
    for file in FOLDER.glob("checkpoint*"):
        file.unlink()
    axes.step(range(200), states, label="never stopped", linewidth=4, alpha=0.4)
    axes.step(range(100, 200), again, label="restored at step 100")
    axes.axvline(100, color="gray", linestyle=":")
    axes.set(xlabel="step", ylabel="log2 of the loss scale")
    axes.legend()
    return figure


def custom_loops() -> Any:
    """The exponents of one step's gradients on their way."""
    generator = tf.random.Generator.from_seed(1)
    x, weights = generator.normal([64, 32]), generator.normal([32, 16])
    scale = lossscale.FixedLossScale(2.0**12)
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = tf.reduce_mean(tf.tanh(x @ weights)) * 2.0**-12
        scaled_loss = scale.scale(loss)
    scaled = tape.gradient(scaled_loss, weights)
    clipped, _ = tf.clip_by_global_norm([scale.unscale(scaled)], 2.0**-20)
    figure, axes = plt.subplots(figsize=(WIDTH, 3.4))
    ways = {"scaled": scaled, "unscaled": scale.unscale(scaled), "clipped": clipped[0]}
    for name, grads in ways.items():
        found = np.log2(np.abs(grads.numpy().ravel()) + 1e-30)
        axes.hist(found, bins=np.arange(-45, -5, 0.5), alpha=0.6, label=name)
    axes.axvspan(-45, -25, color="tab:red", alpha=0.12, label="zero in float16")
    axes.set(xlabel="log2 of a gradient", ylabel="how many")
    axes.legend()
    return figure


def _rows(page: str, pattern: str) -> List[Any]:
    return re.findall(pattern, (HERE / f"{page}.md").read_text(), flags=re.MULTILINE)


def cost() -> Any:
    """The page's own table: what each wrapper adds to a step."""
    number = r"(-?[\d.]+) ±([\d.]+)"
    rows = _rows("cost", rf"^\| (\w+, \w+, \w+, \w+) \| .*? \| {number} \| {number} \|")
    figure, axes = plt.subplots(figsize=(WIDTH, 5))
    for nth, name in enumerate(["Keras 3's own wrapper", "ours"]):
        values = [
            [float(each) for each in row[1 + 2 * nth : 3 + 2 * nth]] for row in rows
        ]
        added, error = np.transpose(values)
        where = np.arange(len(rows)) + 0.38 * nth
        axes.barh(where, added, 0.36, xerr=error, label=name)
    # Four words, two to a line.
    names = [re.sub(r"(,.*?,) ", r"\1\n", row[0]) for row in rows]
    axes.set_yticks(np.arange(len(rows)) + 0.19, names)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds added to a step")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1))
    return figure


def reliability() -> Any:
    """The page's own table of defects, by who has them."""
    who = [row[1] for row in _rows("reliability", r"^\| (\d+) \| (.*?) \|")]
    names = {"K3": "Keras 3", "K2": "Keras 2", "TF": "TensorFlow's loss scales"}
    counts = {named: sum(key in each for each in who) for key, named in names.items()}
    counts["others"] = sum(not any(key in each for key in names) for each in who)
    figure, axes = plt.subplots(figsize=(WIDTH, 2.6))
    bars = axes.barh(list(counts), list(counts.values()))
    axes.bar_label(bars, padding=3)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set(xlabel=f"rows of the {len(who)}: some name several")
    return figure


#: White text is read on each of these, and each is seen on white and on black.
_GROUNDS = {"unscaled": "#1f6f5c", "scaled": "#a8480b", "either": "#5b4b9a"}
_LINE = "#808080"


def _station(axes: Any, station: way.Station, left: float, top: float) -> float:
    """Draws one station of the way. Returns its width."""
    width = {True: 350, False: 390}[station.is_optional]
    width = 192 if station in way.ENDS else width
    ground = _GROUNDS[station.kind]
    style = {"boxstyle": "round,pad=0,rounding_size=6", "linewidth": 0}
    axes.add_patch(FancyBboxPatch((left, top), width, 46, facecolor=ground, **style))
    if station.is_optional:
        inner = {**style, "linewidth": 1, "linestyle": "--", "edgecolor": "white"}
        inset = (left + 3, top + 3)
        axes.add_patch(FancyBboxPatch(inset, width - 6, 40, facecolor="none", **inner))
    pill = {"boxstyle": "round,pad=0,rounding_size=9", "linewidth": 0}
    around = FancyBboxPatch((left + 6, top + 13), 64, 20, facecolor="white", **pill)
    axes.add_patch(around)
    middle = {"ha": "center", "va": "center", "size": 9.1}
    axes.text(left + 38, top + 23, station.kind, color=ground, **middle)
    line = {"color": "white", "va": "center"}
    axes.text(left + 77, top + 15, station.what, weight="bold", size=9.1, **line)
    axes.text(left + 77, top + 33, station.who, family="monospace", size=9.1, **line)
    return width


def _line(axes: Any, start: Any, end: Any) -> None:
    arrow = {"arrowstyle": "-|>", "color": _LINE, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=arrow)


def inside() -> Any:
    """The way of one gradient, from the top to the bottom, as narrow as a phone."""
    height = 62 * (len(way.WAY) + 1) - 14
    # A pixel of a browser is 1/96 inch.
    figure = plt.figure(figsize=(392 / 96, height / 96), layout="none")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-1, 391), ylim=(height - 1, -1))
    axes.axis("off")
    for nth, station in enumerate(way.WAY):
        _station(axes, station, 40 if station.is_optional else 0, 62 * nth)
        if nth:
            _line(axes, (195, 62 * nth - 16), (195, 62 * nth))
        if station.is_optional:  # whoever does not clip goes past it
            _line(axes, (20, 62 * nth - 16), (20, 62 * nth + 62))
    for nth, station in enumerate(way.ENDS):
        left, top = 198 * nth, 62 * len(way.WAY)
        _station(axes, station, left, top)
        _line(axes, (195, top - 16), (left + 96, top))
    return figure


PICTURES: Dict[str, Callable[[], Any]] = {
    draw.__name__: draw
    for draw in (
        *(glance, start, choosing, watching, trouble, replicas, saving),
        *(custom_loops, cost, reliability, inside),
    )
}
DRAWINGS = {"inside"}

if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit("\n".join(filter(None, map(old, PICTURES))) or None)
    for each in sys.argv[1:] or PICTURES:
        save(each)
