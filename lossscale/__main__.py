"""`python -m lossscale`: prints what a bug report must say about an installation.

Its commands replay schedules over a recorded run, and draw pictures of it.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from typing import Any, Dict, Optional, Sequence

import numpy as np
import tensorflow as tf

import lossscale
from lossscale.plotting import pyplot, scale_text
from lossscale.presets import PRESETS
from lossscale.runtime import kerases


def report() -> str:
    """Returns the report: a line for each package and device."""
    lines = {**versions(), **_devices()}
    width = max(map(len, lines))
    return "\n".join(f"{n + ':':{width + 1}} {what}" for n, what in lines.items())


def versions() -> Dict[str, str]:
    """Returns the versions that a bug report needs, by name."""
    build = tf.sysconfig.get_build_info()
    found = {"CUDA": build.get("cuda_version"), "ROCm": build.get("rocm_version")}
    listed = [f"{name} {version}" for name, version in found.items() if version]
    built_for = f", built for {listed[0]}" if listed else ""
    return {
        "lossscale": lossscale.__version__,
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "TensorFlow": f"{tf.__version__}{built_for}",
        "NumPy": np.__version__,
        "tf.keras": _described("tf.keras", kerases.of_tensorflow()),
        "keras": _described("keras", kerases.imported("keras")),
        "tf_keras": _described("tf_keras", kerases.imported("tf_keras")),
    }


def _described(name: str, keras: Any) -> str:
    """Returns a Keras's version, backend and policy, or why it is missing."""
    if keras is None:
        error = kerases.failures[name]
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return "not installed"
        return f"cannot be imported: {type(error).__name__}: {error}"
    try:
        # tf.keras of TensorFlow 2.13 to 2.15 has no version; the package keras has it.
        has_version = hasattr(keras, "__version__")
        owner = keras if has_version else kerases.imported("keras")
        is_keras3 = kerases.is_keras3(keras)
        backend = f", backend {keras.config.backend()}" if is_keras3 else ""
        # Old versions have a global policy only under tf.keras, not in package keras.
        current = getattr(keras.mixed_precision, "global_policy", None)
        policy = f", policy {current().name}" if current else ""
        return f"Keras {owner.__version__}{backend}{policy}"
    except Exception as error:
        return f"is broken: {type(error).__name__}: {error}"


def _devices() -> Dict[str, str]:
    """Returns what is known of each device, by its name."""
    lines = {}
    try:
        for device in tf.config.list_physical_devices():
            is_cpu = device.device_type == "CPU"
            what = f"{os.cpu_count()} cores" if is_cpu else "unnamed"
            details = tf.config.experimental.get_device_details(device)
            what = str(details.get("device_name", what))
            if "compute_capability" in details:
                capability = ".".join(map(str, details["compute_capability"]))
                what += f", compute capability {capability}"
            lines[device.name.replace("/physical_device:", "")] = what
    except Exception as error:  # for example if the driver does not fit
        lines["devices"] = f"cannot be listed: {type(error).__name__}: {error}"
    return lines


def main(given: Optional[Sequence[str]] = None) -> int:
    """Runs the command line. Exits with 2 on a wrong argument, or if it fails."""
    what = "Without a command: prints what a bug report must say."
    parser = argparse.ArgumentParser(prog="lossscale", description=what)
    version = f"lossscale {lossscale.__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.set_defaults(answer=lambda _: report())
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    simulated = commands.add_parser(
        "simulate", help="replay schedules over a recorded run"
    )
    simulated.set_defaults(answer=_simulated)
    simulated.add_argument("--plot", metavar="FILE", help="also draw them to FILE")
    names = sorted(PRESETS)
    simulated.add_argument(
        "--preset",
        nargs="+",
        metavar="NAME",
        choices=names,
        default=["dynamic"],
        help=f"one or more of {', '.join(names)} (dynamic if not given)",
    )
    simulated.add_argument(
        "--nonfinite-loss",
        choices=("backoff", "skip"),
        default="backoff",
        help="what a loss that was not finite itself does (backoff if not given)",
    )
    plotted = commands.add_parser("plot", help="draw a recorded run")
    plotted.set_defaults(answer=_plotted)
    plotted.add_argument(
        "--output", metavar="FILE", help="the picture's file (FILE.png if not given)"
    )
    recorded = "a recorded run, as LossScaleMonitor(record=FILE) writes it"
    for command in (simulated, plotted):
        command.add_argument("file", metavar="FILE", help=recorded)
    asked = parser.parse_args(given)
    try:
        print(asked.answer(asked))
    except (ImportError, OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    return 0


def _simulated(asked: argparse.Namespace) -> str:
    """Returns a line for each schedule, and draws them if --plot is given."""
    run = lossscale.load_run(asked.file)
    lines = [f"{'':24}{'skipped':>10}{'longest stall':>15}{'at the end':>12}"]
    simulations = {}
    for name in asked.preset:
        given, recorded = {}, run.loss_scale
        asks_for_start = "initial_loss_scale" in PRESETS[name].asks_for
        if asks_for_start and recorded is not None and len(recorded):
            given["initial_loss_scale"] = float(recorded[0])  # where the run began
        loss_scale = lossscale.DynamicLossScale.from_preset(name, **given)
        simulations[name] = simulation = lossscale.simulate(
            loss_scale,
            is_finite=run.is_finite,
            largest=run.largest,
            bad_losses=run.bad_losses,
            nonfinite_loss=asked.nonfinite_loss,
        )
        final = scale_text(simulation.final_loss_scale)
        lost, stall = simulation.steps_lost, simulation.longest_stall
        lines.append(f"{name:24}{lost:>10}{stall:>15}{final:>12}")
    if asked.plot:
        size = {"figsize": (8, 3 * len(simulations)), "layout": "constrained"}
        figure, axes = pyplot().subplots(
            len(simulations), sharex=True, squeeze=False, **size
        )
        for ax, (name, simulation) in zip(axes.flat, simulations.items()):
            simulation.plot(ax).set_title(name)
        figure.savefig(asked.plot)
    return "\n".join(lines)


def _plotted(asked: argparse.Namespace) -> str:
    """Draws a run. Returns its summary, and where the picture is."""
    run = lossscale.load_run(asked.file)
    output = asked.output or f"{os.path.splitext(asked.file)[0]}.png"
    run.plot().figure.savefig(output)
    return f"{run}\nThe picture is {output}."


if __name__ == "__main__":
    sys.exit(main())
