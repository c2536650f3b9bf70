"""`python -m lossscale`: what a bug report needs to say of an installation."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Tuple

import tensorflow as tf

from lossscale.runtime import kerases

#: From this compute capability on an NVIDIA GPU has float16 tensor cores.
TENSOR_CORES = (7, 0)


def report() -> str:
    """Returns the report, one line for each thing."""
    lines = {**kerases.versions(), **_devices()}
    width = max(map(len, lines))
    listed = [f"{name + ':':{width + 1}} {value}" for name, value in lines.items()]
    advice = "bfloat16 and float32 need no loss scaling on any device."
    return "\n".join([*listed, advice])


def _devices() -> Dict[str, str]:
    try:
        found = tf.config.list_physical_devices()
    except Exception as error:  # a driver that does not fit, say
        return {"devices": f"cannot be listed: {type(error).__name__}: {error}"}
    named = {device.name.replace("/physical_device:", ""): device for device in found}
    return {name: _described(device) for name, device in named.items()}


def _described(device: Any) -> str:
    name, capability = _details(device)
    return f"{name}; {advice(device.device_type, capability)}"


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


def advice(device_type: str, capability: Optional[Tuple[int, ...]]) -> str:
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
