"""`python -m lossscale`: what a bug report needs to say of an installation."""

from __future__ import annotations

import os
import platform
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import tensorflow as tf

import lossscale
from lossscale.runtime import kerases

#: From this compute capability on an NVIDIA GPU has float16 tensor cores.
TENSOR_CORES = (7, 0)


def report() -> str:
    """Returns the report, one line for each thing."""
    lines = {**versions(), **_devices()}
    width = max(map(len, lines))
    listed = [f"{name + ':':{width + 1}} {value}" for name, value in lines.items()]
    advice = "bfloat16 and float32 need no loss scaling on any device."
    return "\n".join([*listed, advice])


def versions() -> Dict[str, str]:
    """Returns the version of all that a bug report needs, by name."""
    return {
        "lossscale": lossscale.__version__,
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "TensorFlow": f"{tf.__version__}{_built_for()}",
        "NumPy": np.__version__,
        "tf.keras": _described("tf.keras", kerases.of_tensorflow()),
        "keras": _described("keras", kerases.imported("keras")),
        "tf_keras": _described("tf_keras", kerases.imported("tf_keras")),
    }


def _built_for() -> str:
    build = tf.sysconfig.get_build_info()
    found = {"CUDA": build.get("cuda_version"), "ROCm": build.get("rocm_version")}
    listed = [f"{name} {version}" for name, version in found.items() if version]
    return f", built for {listed[0]}" if listed else ""


def _described(name: str, keras: Any) -> str:
    """Returns a Keras's version, its backend and its policy; or why it is not there."""
    if keras is None:
        error = kerases.failures[name]
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return "not installed"
        return f"cannot be imported: {type(error).__name__}: {error}"
    try:
        # tf.keras of TensorFlow 2.13 to 2.15 has no version: the package keras has.
        has_version = hasattr(keras, "__version__")
        owner = keras if has_version else kerases.imported("keras")
        is_keras3 = kerases.is_keras3(keras)
        backend = f", backend {keras.config.backend()}" if is_keras3 else ""
        # The package keras of old versions has it under tf.keras only.
        current = getattr(keras.mixed_precision, "global_policy", None)
        policy = f", policy {current().name}" if current else ""
        return f"Keras {owner.__version__}{backend}{policy}"
    except Exception as error:
        return f"is broken: {type(error).__name__}: {error}"


def _devices() -> Dict[str, str]:
    try:
        found = tf.config.list_physical_devices()
    except Exception as error:  # a driver that does not fit, say
        return {"devices": f"cannot be listed: {type(error).__name__}: {error}"}
    named = {device.name.replace("/physical_device:", ""): device for device in found}
    return {name: _device(device) for name, device in named.items()}


def _device(device: Any) -> str:
    """Returns a device's name, and whether loss scaling makes sense on it."""
    name, capability = _details(device)
    return f"{name}; {on_device(device.device_type, capability)}"


def _details(device: Any) -> Tuple[str, Optional[Tuple[int, ...]]]:
    """Returns a device's name, and its compute capability if it has one."""
    if device.device_type == "CPU":
        return f"{os.cpu_count()} cores", None
    try:
        details: Dict[str, Any] = tf.config.experimental.get_device_details(device)
    except Exception as error:
        return f"no details: {type(error).__name__}: {error}", None
    capability = details.get("compute_capability")
    words: List[str] = [str(details.get("device_name", "unnamed"))]
    if capability is not None:
        words.append(f"compute capability {'.'.join(map(str, capability))}")
    return ", ".join(words), capability


def on_device(device_type: str, capability: Optional[Tuple[int, ...]]) -> str:
    """Returns whether float16 with loss scaling makes sense on a device."""
    if device_type == "TPU":
        return "loss scaling: no, take mixed_bfloat16, which needs none"
    if device_type == "CPU":
        return "loss scaling: works, but float16 is slow here: for tests"
    if device_type != "GPU":
        return "loss scaling: not tried on this kind of device"
    if capability is None:
        return "loss scaling: yes, for float16; how fast that is, is not known here"
    if tuple(capability) < TENSOR_CORES:
        return (
            "loss scaling: works; without tensor cores float16 saves memory, not time"
        )
    return "loss scaling: yes, for float16, which its tensor cores compute fast"


if __name__ == "__main__":
    print(report())
