"""A table of other systems' schedules, as arguments of DynamicLossScale.

Every framework has its own rule for moving its loss scale. Each of these is the rule of
`DynamicLossScale` with other arguments. Use one by its name:

>>> import lossscale
>>> loss_scale = lossscale.DynamicLossScale.from_preset("torch", increment_period=100)
>>> float(loss_scale), loss_scale.increment_period
(65536.0, 100)

`PRESETS` is the table. Each entry names its source, and says how it differs from it:

>>> print(PRESETS["flax"].source)
flax 0.12.8, flax/training/dynamic_scale.py, DynamicScale
>>> PRESETS["jmp"].asks_for
('initial_loss_scale',)

Three differences apply to all presets, and the table does not repeat them:

* No schedule here ever leaves float32's normal range. If the original has no floor,
  ours is the smallest normal float32, so that the loss scale can never be 0. If the
  original grows to infinity, ours stops before.
* Growth and backoff test `>=`, but most originals test `==`. If a restored counter is
  beyond its period, ours grows at the next good step, and such an original never again.
* We compute the scale in float32. torch multiplies in float64 and rounds: the result is
  the same to the last bit for factors that float32 holds exactly, as all defaults are.
  DeepSpeed and apex double and halve a Python float: again the result is the same.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Dict, Mapping, NamedTuple, Tuple

from lossscale import arguments


class Preset(NamedTuple):
    """One system's schedule.

    Attributes:
      arguments: Arguments of `DynamicLossScale`. The others keep their defaults.
      asks_for: Arguments that you must give, since the system has no default for them.
      source: The system, version and file from which the arguments were read.
      differs: How a run differs from the original's, besides the differences above.
    """

    arguments: Mapping[str, Any]
    asks_for: Tuple[str, ...]
    source: str
    differs: str


def _preset(source: str, differs: str = "", **given: Any) -> Preset:
    """Returns a row of the table. `...` marks what the user must give."""
    asks_for = tuple(name for name, value in given.items() if value is ...)
    settled = {name: value for name, value in given.items() if value is not ...}
    return Preset(MappingProxyType(settled), asks_for, source, differs)


#: Our floor for systems that have none: the smallest normal float32.
_NO_FLOOR = arguments.FLOAT32_MIN
# Each row was read from the file and the version that it names, never written from
# memory. `tests/scales/test_originals.py` runs most of them against the original.
_NAMED = {
    "tensorflow": _preset(
        "TensorFlow 2.21, tensorflow/python/training/experimental/loss_scale.py, "
        "DynamicLossScale; tf_keras 2.21, "
        "tf_keras/src/mixed_precision/loss_scale_optimizer.py",
        initial_loss_scale=2.0**15,
        increment_period=2000,
    ),
    "keras3": _preset(
        "Keras 3.15.1, keras/src/optimizers/loss_scale_optimizer.py, "
        "LossScaleOptimizer",
        "Theirs can fall to 0 or grow to infinity, and stays there.",
        initial_loss_scale=2.0**15,
        increment_period=2000,
        backoff_factor=0.5,
        min_loss_scale=_NO_FLOOR,
    ),
    "torch": _preset(
        "PyTorch 2.13.0, torch/amp/grad_scaler.py, GradScaler",
        "Theirs falls to 0.",
        initial_loss_scale=2.0**16,
        increment_period=2000,
        backoff_factor=0.5,
        min_loss_scale=_NO_FLOOR,
    ),
    "jmp": _preset(
        "jmp 0.0.4, jmp/_src/loss_scale.py, DynamicLossScale",
        "Under jax.jit theirs ignores any floor other than 1.",
        initial_loss_scale=...,
        increment_period=2000,
    ),
    "flax": _preset(
        "flax 0.12.8, flax/training/dynamic_scale.py, DynamicScale",
        "Theirs counts one step more: growth_interval=2000 grows on the 2001st "
        "good step. For their growth_interval=n give increment_period=n + 1.",
        initial_loss_scale=2.0**16,
        increment_period=2001,
        backoff_factor=0.5,
        min_loss_scale=_NO_FLOOR,
        max_loss_scale=arguments.FLOAT32_MAX,
    ),
    "apex": _preset(
        "apex at b82c6bd, apex/amp/scaler.py, LossScaler, and "
        "apex/amp/frontend.py, initialize",
        "Theirs falls to 0, unless initialize is given min_loss_scale.",
        initial_loss_scale=2.0**16,
        increment_period=2000,
        backoff_factor=0.5,
        min_loss_scale=_NO_FLOOR,
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
        min_loss_scale=_NO_FLOOR,
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
        "The same as for deepspeed.",
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
        min_loss_scale=_NO_FLOOR,
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
    "openseq2seq": _preset(
        "OpenSeq2Seq at 2383d5d, open_seq2seq/optimizers/automatic_loss_scaler.py, "
        "BackoffScaler",
        "Theirs reads and increments its count of steps in no fixed order: a growth "
        "may come a step early or late.",
        initial_loss_scale=2.0**24,
        increment_period=2000,
        max_loss_scale=2.0**24,
    ),
    "mindspore": _preset(
        "MindSpore 2.10.0, mindspore/train/loss_scale_manager.py, "
        "DynamicLossScaleManager, and mindspore/nn/wrap/loss_scale.py, "
        "DynamicLossScaleUpdateCell",
        "Theirs grows to infinity. The manager's update_loss_scale raises an error at "
        "the 1001st bad step in a row.",
        initial_loss_scale=2.0**24,
        increment_period=2000,
    ),
    "oneflow": _preset(
        "OneFlow 0.9.0, oneflow/amp/grad_scaler.py, GradScaler; rule and bounds: "
        "oneflow/user/kernels/dynamic_loss_scale_schedule_kernel.cpp at 9d8039e",
        "An older kernel (at 2f1c18a) stops at 2**16. For it give "
        "max_loss_scale=2.0**16.",
        initial_loss_scale=2.0**16,
        increment_period=2000,
        max_loss_scale=arguments.FLOAT32_MAX,
    ),
    "paddle_static": _preset(
        "PaddlePaddle 3.3.1, paddle/static/amp/decorator.py, decorate",
        "There are two functions of that name. These are the defaults of the older, "
        "which runs if use_pure_fp16, use_fp16_guard or use_bf16 is given. The newer "
        "one has the defaults of paddle, with a floor of 1.",
        initial_loss_scale=2.0**15,
        increment_period=1000,
        backoff_factor=0.8,
        hysteresis=2,
        hysteresis_reset=("good", "backoff"),
    ),
    "guided_diffusion": _preset(
        "guided-diffusion at 22e0df8, guided_diffusion/fp16_util.py, "
        "MixedPrecisionTrainer",
        "Theirs adds 0.001 to the logarithm of the scale, in float64, and has no "
        "bounds. Ours, in float32, is 0.05 % off after 10,000 good steps in a row.",
        initial_loss_scale=2.0**20,
        increment_period=1,
        multiplier=2.0**0.001,
        backoff_factor=0.5,
        min_loss_scale=_NO_FLOOR,
    ),
    "nemo": _preset(
        "NeMo 2.2.1, nemo/lightning/_strategy_lib.py, GradScaler",
        "Theirs falls to 0. Its load_state_dict misspells a key: after a restore the "
        "next bad step always lowers its scale, whatever the hysteresis.",
        initial_loss_scale=2.0**16,
        increment_period=2000,
        backoff_factor=0.5,
        hysteresis=...,
        hysteresis_reset=("good",),
        min_loss_scale=_NO_FLOOR,
    ),
    "mpx": _preset(
        "mixed-precision-for-JAX 0.1.8, mpx/_loss_scaling.py, DynamicLossScaling",
        "Theirs has no default floor; its README gives 1.",
        initial_loss_scale=...,
        increment_period=2000,
        max_loss_scale=65504.0,
    ),
    "mmcv": _preset(
        "mmcv 1.7.2, mmcv/runner/fp16_utils.py, LossScaler",
        "Theirs grows to infinity. Fp16OptimizerHook uses it before torch 1.6, and "
        "torch's GradScaler since; its default, 512, is a fixed scale.",
        initial_loss_scale=2.0**32,
        increment_period=1000,
    ),
    "fairseq": _preset(
        "fairseq 0.12.2, fairseq/optim/dynamic_loss_scaler.py, DynamicLossScaler; "
        "its arguments in training: fairseq/optim/fp16_optimizer.py",
        "Theirs grows to infinity. It ends the run when the scale would be 1e-4 or "
        "less: our floor is the last power of two above. Its trainer starts at 2**7 "
        "and grows after 2**14 / (workers * update_freq) steps. Its tolerance, 0 by "
        "default, is `overflow_tolerance`.",
        initial_loss_scale=2.0**15,
        increment_period=2000,
        min_loss_scale=2.0**-13,
    ),
    "chainer": _preset(
        "Chainer 7.8.1, chainer/optimizer.py, Optimizer.loss_scaling",
        "After the first bad step theirs grows by 2**(1 / 1000) at each good step, "
        "ours by 2 after 1000 in a row. No snapshot holds theirs: it starts again.",
        initial_loss_scale=1.0,
        increment_period=1000,
        backoff_factor=0.5,
        max_loss_scale=65504.0,
        search_period=1,
    ),
    "stylegan2": _preset(
        "StyleGAN2 at 59af465, dnnlib/tflib/optimizer.py, Optimizer",
        "Theirs adds 0.0005 to the logarithm of the scale, in float32, and has no "
        "bounds.",
        initial_loss_scale=2.0**64,
        increment_period=1,
        multiplier=2.0**0.0005,
        backoff_factor=0.5,
        min_loss_scale=_NO_FLOOR,
    ),
    "director": _preset(
        "Director at a6a649e, embodied/agents/director/tfutils.py, Optimizer",
        "Theirs grows on the step after 1000 good ones. It ends the run when the "
        "scaled loss is not finite. DreamerV2 uses Keras's schedule: tensorflow.",
        initial_loss_scale=1e4,
        increment_period=1001,
        backoff_factor=0.5,
        min_loss_scale=1e-4,
        max_loss_scale=1e4,
    ),
    "dalle": _preset(
        "Ramesh et al. 2021, Zero-Shot Text-to-Image Generation, arXiv 2102.12092, "
        "appendix D; its code is not public",
        "Theirs has a scale for each residual block, and multiplies start and bounds "
        "by the number of replicas, whose gradients it averages. Ours is one scale for "
        "the whole model.",
        initial_loss_scale=2.0**13,
        increment_period=1,
        multiplier=2.0**0.001,
        backoff_factor=2.0**-0.5,
        min_loss_scale=2.0**7,
        max_loss_scale=2.0**24,
        backoff_cooldown=125,
    ),
}
#: Name -> `Preset`.
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {"dynamic": _NAMED["tensorflow"], **_NAMED}
)


def preset_arguments(
    name: str, overrides: Mapping[str, Any], call: str = ""
) -> Dict[str, Any]:
    """Returns the preset's arguments. `overrides` take precedence over them.

    Args:
      name: A key of `PRESETS`.
      overrides: Arguments of `DynamicLossScale`.
      call: The user's call, as text up to the overrides, for the error.

    Raises:
      TypeError: `name` is no string, or the preset asks for an argument that
        `overrides` lacks.
      ValueError: There is no such preset.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"`name` must be the name of a preset, got {arguments.shown(name)}."
        )
    if name not in PRESETS:
        raise ValueError(
            f"`name` must be one of {arguments.one_of(sorted(PRESETS))}, got {name!r}."
        )
    preset = PRESETS[name]
    call = call or f"DynamicLossScale.from_preset({name!r}"
    for argument in preset.asks_for:
        if argument not in overrides:
            listed = ", ".join(f"{argument}=..." for argument in preset.asks_for)
            raise TypeError(
                f"`{argument}` must be given with the preset {name!r}, which has no "
                f"default for it, got nothing. Write {call}, {listed})."
            )
    return {**preset.arguments, **overrides}
