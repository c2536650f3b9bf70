"""Other systems' schedules, as arguments of DynamicLossScale: a table.

Every framework moves its loss scale by a rule of its own, and all of them are the one
rule of `DynamicLossScale` with other arguments. Take one by its name:

>>> import lossscale
>>> loss_scale = lossscale.DynamicLossScale.from_preset("torch", increment_period=100)
>>> float(loss_scale), loss_scale.increment_period
(65536.0, 100)

`PRESETS` is the table. Each entry names its source and says where it differs:

>>> print(PRESETS["flax"].source)
flax 0.12.8, flax/training/dynamic_scale.py, DynamicScale
>>> PRESETS["jmp"].asks_for
('initial_loss_scale',)

Three differences are the same everywhere and are not repeated in the table:

* No schedule here ever leaves float32's normal range. Where theirs has no floor, ours
  is the smallest normal float32, so that the loss scale can never be 0. Where theirs
  grows to infinity, ours refuses the growth.
* Growth and backoff test `>=`, where most of theirs test `==`: a counter that was
  restored from beyond its period grows at the next good step, and there never again.
* The scale is computed in float32. torch multiplies in float64 and rounds: the same to
  the last bit for factors that float32 holds exactly, as all defaults are. DeepSpeed
  and apex keep a Python float, and only double and halve it: the same again.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Dict, Mapping, NamedTuple, Tuple

from lossscale import arguments

#: The floor of systems that have none: the smallest normal float32.
NO_FLOOR = arguments.FLOAT32_MIN


class Preset(NamedTuple):
    """One system's schedule.

    Attributes:
      arguments: Arguments of `DynamicLossScale`. Those not named have its defaults.
      asks_for: Arguments that the system leaves to its user, and so does the preset.
      source: System, version and file that the arguments were read from.
      differs: Where a run differs from the original's, other than said above.
    """

    arguments: Mapping[str, Any]
    asks_for: Tuple[str, ...]
    source: str
    differs: str


def _preset(source: str, differs: str = "", **given: Any) -> Preset:
    asks_for = tuple(name for name, value in given.items() if value is ...)
    settled = {name: value for name, value in given.items() if value is not ...}
    return Preset(MappingProxyType(settled), asks_for, source, differs)


_TENSORFLOW = _preset(
    "TensorFlow 2.21, tensorflow/python/training/experimental/loss_scale.py, "
    "DynamicLossScale; tf_keras 2.21, "
    "tf_keras/src/mixed_precision/loss_scale_optimizer.py",
    initial_loss_scale=2.0**15,
    increment_period=2000,
)

#: Name -> `Preset`. `...` marks what the caller must give.
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "dynamic": _TENSORFLOW,
        "tensorflow": _TENSORFLOW,
        "keras3": _preset(
            "Keras 3.15.1, keras/src/optimizers/loss_scale_optimizer.py, "
            "LossScaleOptimizer",
            "Theirs falls to 0 and grows to infinity, and stays there.",
            initial_loss_scale=2.0**15,
            increment_period=2000,
            backoff_factor=0.5,
            min_loss_scale=NO_FLOOR,
        ),
        "torch": _preset(
            "PyTorch 2.13.0, torch/amp/grad_scaler.py, GradScaler",
            "Theirs falls to 0.",
            initial_loss_scale=2.0**16,
            increment_period=2000,
            backoff_factor=0.5,
            min_loss_scale=NO_FLOOR,
        ),
        "jmp": _preset(
            "jmp 0.0.4, jmp/_src/loss_scale.py, DynamicLossScale",
            "Under jax.jit theirs loses a floor other than 1.",
            initial_loss_scale=...,
            increment_period=2000,
        ),
        "flax": _preset(
            "flax 0.12.8, flax/training/dynamic_scale.py, DynamicScale",
            "Theirs counts one step more: growth_interval=2000 grows on the 2001st "
            "good step. For their n give increment_period=n + 1.",
            initial_loss_scale=2.0**16,
            increment_period=2001,
            backoff_factor=0.5,
            min_loss_scale=NO_FLOOR,
            max_loss_scale=arguments.FLOAT32_MAX,
        ),
        "apex": _preset(
            "apex at b82c6bd, apex/amp/scaler.py, LossScaler, and "
            "apex/amp/frontend.py, initialize",
            "Theirs falls to 0, unless initialize is given min_loss_scale.",
            initial_loss_scale=2.0**16,
            increment_period=2000,
            backoff_factor=0.5,
            min_loss_scale=NO_FLOOR,
            max_loss_scale=2.0**24,
        ),
        "apex_hysteresis": _preset(
            "apex at 16aaa78, csrc/update_scale_hysteresis.cu",
            "Theirs falls to 0.",
            initial_loss_scale=...,
            increment_period=...,
            backoff_factor=0.5,
            hysteresis=...,
            hysteresis_reset=("good",),
            min_loss_scale=NO_FLOOR,
        ),
        "deepspeed": _preset(
            "DeepSpeed at 0336518, deepspeed/runtime/fp16/loss_scaler.py, "
            "DynamicLossScaler; defaults: deepspeed/runtime/precision_config.py",
            "Theirs ends the run at the floor (raise_error_at_min_scale). From some "
            "later version on (0.19.8 has it) the first growth after the start, and "
            "after an overflow, comes one step later, on the 1001st good step.",
            initial_loss_scale=2.0**16,
            increment_period=1000,
            hysteresis=2,
            hysteresis_reset=("growth",),
        ),
        "deepspeed_consecutive": _preset(
            "DeepSpeed at 0336518, deepspeed/runtime/fp16/loss_scaler.py, "
            "DynamicLossScaler with consecutive_hysteresis=True",
            "As deepspeed.",
            initial_loss_scale=2.0**16,
            increment_period=1000,
            hysteresis=2,
            hysteresis_reset=("good",),
        ),
        "megatron": _preset(
            "megatron-core 0.16.1, megatron/core/optimizer/grad_scaler.py, "
            "DynamicGradScaler; defaults: megatron/core/optimizer/optimizer_config.py",
            "Theirs grows to infinity.",
            initial_loss_scale=2.0**32,
            increment_period=1000,
            backoff_factor=0.5,
            hysteresis=2,
            hysteresis_reset=("growth",),
        ),
        "colossalai": _preset(
            "ColossalAI 0.5.0, colossalai/amp/naive_amp/grad_scaler/"
            "dynamic_grad_scaler.py, DynamicGradScaler; bounds: colossalai/amp/"
            "naive_amp/mixed_precision_mixin/fp16.py",
            "Its booster plugins start at 2**32.",
            initial_loss_scale=2.0**16,
            increment_period=1000,
            backoff_factor=0.5,
            hysteresis=2,
            hysteresis_reset=("growth",),
            max_loss_scale=2.0**32,
        ),
        "paddle": _preset(
            "PaddlePaddle 3.3.1, paddle/amp/grad_scaler.py, GradScaler",
            "Theirs falls to 0 and grows to infinity.",
            initial_loss_scale=2.0**16,
            increment_period=2000,
            backoff_factor=0.5,
            hysteresis=1,
            hysteresis_reset=("good", "backoff"),
            min_loss_scale=NO_FLOOR,
        ),
        "contrib": _preset(
            "TensorFlow 1.15.5, tensorflow/contrib/mixed_precision/python/"
            "loss_scale_manager.py, ExponentialUpdateLossScaleManager",
            initial_loss_scale=...,
            increment_period=...,
            backoff_factor=0.8,
            hysteresis=2,
            hysteresis_reset=("growth", "backoff"),
        ),
    }
)


def preset_arguments(name: str, overrides: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns the preset's arguments, with `overrides` in their place.

    Args:
      name: A key of `PRESETS`.
      overrides: Arguments of `DynamicLossScale`.

    Raises:
      TypeError: `name` is no string, or the preset asks for an argument that
        `overrides` does not have.
      ValueError: There is no such preset.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"`name` must be the name of a preset, got {arguments.shown(name)}."
        )
    if name not in PRESETS:
        raise ValueError(
            f"`name` must be one of {', '.join(map(repr, sorted(PRESETS)))}, "
            f"got {name!r}."
        )
    preset = PRESETS[name]
    for argument in preset.asks_for:
        if argument not in overrides:
            listed = ", ".join(f"{argument}=..." for argument in preset.asks_for)
            raise TypeError(
                f"`{argument}` must be given with the preset {name!r}, which leaves it "
                "to you, got nothing. Write DynamicLossScale.from_preset"
                f"({name!r}, {listed})."
            )
    return {**preset.arguments, **overrides}
