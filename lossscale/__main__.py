"""`python -m lossscale`: prints what a bug report must say about an installation."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from typing import Any, Dict, Optional, Sequence

import numpy as np
import tensorflow as tf

import lossscale
from lossscale.runtime import keras_versions


def report() -> str:
    """Returns the report: a line for each package and device."""
    lines = {**versions(), **_devices()}
    width = max(map(len, lines))
    return "\n".join(f"{n + ':':{width + 1}} {what}" for n, what in lines.items())


def versions() -> Dict[str, str]:
    """Returns the versions that a bug report needs, by name."""
    build = tf.sysconfig.get_build_info()
    versions_of = {"CUDA": build.get("cuda_version"), "ROCm": build.get("rocm_version")}
    listed = [f"{name} {version}" for name, version in versions_of.items() if version]
    built_for = f", built for {listed[0]}" if listed else ""
    return {
        "lossscale": lossscale.__version__,
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "TensorFlow": f"{tf.__version__}{built_for}",
        "NumPy": np.__version__,
        "tf.keras": _described("tf.keras", keras_versions.of_tensorflow()),
        "keras": _described("keras", keras_versions.imported("keras")),
        "tf_keras": _described("tf_keras", keras_versions.imported("tf_keras")),
    }


def _described(name: str, keras: Any) -> str:
    """Returns a Keras's version, backend and policy, or why it is missing."""
    if keras is None:
        error = keras_versions.failures[name]
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return "not installed"
        return f"cannot be imported: {type(error).__name__}: {error}"
    try:
        # tf.keras of TensorFlow 2.13 to 2.15 has no version; the package keras has it.
        has_version = hasattr(keras, "__version__")
        owner = keras if has_version else keras_versions.imported("keras")
        is_keras3 = keras_versions.is_keras3(keras)
        backend = f", backend {keras.config.backend()}" if is_keras3 else ""
        # Old versions have a global policy only under tf.keras, not in package keras.
        current = getattr(keras.mixed_precision, "global_policy", None)
        policy = f", policy {current().name}" if current else ""
        return f"Keras {owner.__version__}{backend}{policy}"
    except Exception as error:
        return f"is broken: {type(error).__name__}: {error}"


def _devices() -> Dict[str, str]:
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


def main(command_line: Optional[Sequence[str]] = None) -> int:
    """Runs the command line. Exits with 2 on a wrong argument."""
    what = "Prints what a bug report must say about this installation."
    parser = argparse.ArgumentParser(prog="lossscale", description=what)
    version = f"lossscale {lossscale.__version__}"
    parser.add_argument("--version", action="version", version=version)
    _, others = parser.parse_known_args(command_line)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    tf.get_logger().setLevel("ERROR")  # tf_keras warns of itself
    print(report(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
