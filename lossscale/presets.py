"""Other systems' schedules: a table of arguments of DynamicLossScale.

Use one to train as torch, Megatron or another system would: write its name for the
loss scale, or `DynamicLossScale.from_preset("torch")`, which takes other arguments.
Each entry of the table, `PRESETS`, names its source, and how the preset differs:

>>> print(PRESETS["flax"].source)
flax 0.12.8, flax/training/dynamic_scale.py, DynamicScale
>>> PRESETS["jmp"].asks_for
('initial_loss_scale',)

Three differences apply to all presets:

* No schedule here ever leaves float32's normal range. If the original has no floor,
  ours is the smallest normal float32, so that the loss scale can never be 0. If the
  original grows to infinity, ours stops before.
* Growth and backoff test `>=`, but most originals test `==`. If a restored counter is
  beyond its period, ours grows at the next good step, and the original never does.
* We compute the scale in float32. torch, DeepSpeed and apex compute in float64: the
  result is the same to the last bit for factors that float32 holds exactly, as all
  their defaults are.
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


#: The columns of the table. A row may end early. None, or no cell: the default.
_COLUMNS = (
    "initial_loss_scale",
    "increment_period",
    "multiplier",
    "backoff_factor",
    "hysteresis",
    "hysteresis_reset",
    "min_loss_scale",
    "max_loss_scale",
)
#: Our floor for systems that have none: the smallest normal float32.
_NO_FLOOR = arguments.FLOAT32_MIN


def _row(
    cells: Tuple[Any, ...], source: str, differs: str = "", **others: Any
) -> Preset:
    """Returns a row of the table. `...` marks what the user must give."""
    row = {k: v for k, v in zip(_COLUMNS, cells) if v is not None}
    asks_for = tuple(name for name, value in row.items() if value is ...)
    settled = {name: value for name, value in row.items() if value is not ...}
    return Preset(MappingProxyType({**settled, **others}), asks_for, source, differs)


# Each row was read from the file and the version that it names, never written from
# memory. `tests/scales/test_originals.py` runs most of them against the original.
_NAMED = {
    "tensorflow": _row(
        (2.0**15, 2000),
        "TensorFlow 2.21, tensorflow/python/training/experimental/loss_scale.py, "
        "DynamicLossScale; tf_keras 2.21, "
        "tf_keras/src/mixed_precision/loss_scale_optimizer.py",
    ),
    "keras3": _row(
        (2.0**15, 2000, None, 0.5, None, None, _NO_FLOOR),
        "Keras 3.15.1, keras/src/optimizers/loss_scale_optimizer.py, "
        "LossScaleOptimizer",
        "Theirs can fall to 0 or grow to infinity, and stays there.",
    ),
    "torch": _row(
        (2.0**16, 2000, None, 0.5, None, None, _NO_FLOOR),
        "PyTorch 2.13.0, torch/amp/grad_scaler.py, GradScaler",
        "Theirs falls to 0.",
    ),
    "jmp": _row(
        (..., 2000),
        "jmp 0.0.4, jmp/_src/loss_scale.py, DynamicLossScale",
        "Under jax.jit theirs ignores any floor other than 1.",
    ),
    "flax": _row(
        (2.0**16, 2001, None, 0.5, None, None, _NO_FLOOR, arguments.FLOAT32_MAX),
        "flax 0.12.8, flax/training/dynamic_scale.py, DynamicScale",
        "Theirs counts one step more: growth_interval=2000 grows on the 2001st "
        "good step. For their growth_interval=n give increment_period=n + 1.",
    ),
    "apex": _row(
        (2.0**16, 2000, None, 0.5, None, None, _NO_FLOOR, 2.0**24),
        "apex at b82c6bd, apex/amp/scaler.py, LossScaler, and "
        "apex/amp/frontend.py, initialize",
        "Theirs falls to 0, unless initialize is given min_loss_scale.",
    ),
    "apex_hysteresis": _row(
        (..., ..., None, 0.5, ..., ("good",), _NO_FLOOR),
        "apex at 16aaa78, csrc/update_scale_hysteresis.cu",
        "Theirs falls to 0.",
    ),
    "deepspeed": _row(
        (2.0**16, 1000, None, None, 2, ("growth",)),
        "DeepSpeed at 0336518, deepspeed/runtime/fp16/loss_scaler.py, "
        "DynamicLossScaler; defaults: deepspeed/runtime/precision_config.py",
        "Theirs ends the run at the floor (raise_error_at_min_scale). From some "
        "later version on (0.19.8 has it) the first growth after the start, and "
        "after an overflow, comes one step later, on the 1001st good step.",
    ),
    "deepspeed_consecutive": _row(
        (2.0**16, 1000, None, None, 2, ("good",)),
        "DeepSpeed at 0336518, deepspeed/runtime/fp16/loss_scaler.py, "
        "DynamicLossScaler with consecutive_hysteresis=True",
        "The same as for deepspeed.",
    ),
    "megatron": _row(
        (2.0**32, 1000, None, 0.5, 2, ("growth",)),
        "megatron-core 0.16.1, megatron/core/optimizer/grad_scaler.py, "
        "DynamicGradScaler; defaults: megatron/core/optimizer/optimizer_config.py",
        "Theirs grows to infinity.",
    ),
    "colossalai": _row(
        (2.0**16, 1000, None, 0.5, 2, ("growth",), None, 2.0**32),
        "ColossalAI 0.5.0, colossalai/amp/naive_amp/grad_scaler/"
        "dynamic_grad_scaler.py, DynamicGradScaler; bounds: colossalai/amp/"
        "naive_amp/mixed_precision_mixin/fp16.py",
        "Its booster plugins start at 2**32.",
    ),
    "paddle": _row(
        (2.0**16, 2000, None, 0.5, 1, ("good", "backoff"), _NO_FLOOR),
        "PaddlePaddle 3.3.1, paddle/amp/grad_scaler.py, GradScaler",
        "Theirs falls to 0 and grows to infinity.",
    ),
    "contrib": _row(
        (..., ..., None, 0.8, 2, ("growth", "backoff")),
        "TensorFlow 1.15.5, tensorflow/contrib/mixed_precision/python/"
        "loss_scale_manager.py, ExponentialUpdateLossScaleManager",
    ),
    "openseq2seq": _row(
        (2.0**24, 2000, None, None, None, None, None, 2.0**24),
        "OpenSeq2Seq at 2383d5d, open_seq2seq/optimizers/automatic_loss_scaler.py, "
        "BackoffScaler",
        "Theirs reads and increments its count of steps in no fixed order: a growth "
        "may come a step early or late.",
    ),
    "mindspore": _row(
        (2.0**24, 2000),
        "MindSpore 2.10.0, mindspore/train/loss_scale_manager.py, "
        "DynamicLossScaleManager, and mindspore/nn/wrap/loss_scale.py, "
        "DynamicLossScaleUpdateCell",
        "Theirs grows to infinity. The manager's update_loss_scale raises an error at "
        "the 1001st bad step in a row.",
    ),
    "oneflow": _row(
        (2.0**16, 2000, None, None, None, None, None, arguments.FLOAT32_MAX),
        "OneFlow 0.9.0, oneflow/amp/grad_scaler.py, GradScaler; rule and bounds: "
        "oneflow/user/kernels/dynamic_loss_scale_schedule_kernel.cpp at 9d8039e",
        "An older kernel (at 2f1c18a) stops at 2**16. For it give "
        "max_loss_scale=2.0**16.",
    ),
    "paddle_static": _row(
        (2.0**15, 1000, None, 0.8, 2, ("good", "backoff")),
        "PaddlePaddle 3.3.1, paddle/static/amp/decorator.py, decorate",
        "There are two functions of that name. These are the defaults of the older, "
        "which runs if use_pure_fp16, use_fp16_guard or use_bf16 is given. The newer "
        "one has the defaults of paddle, with a floor of 1.",
    ),
    "guided_diffusion": _row(
        (2.0**20, 1, 2.0**0.001, 0.5, None, None, _NO_FLOOR),
        "guided-diffusion at 22e0df8, guided_diffusion/fp16_util.py, "
        "MixedPrecisionTrainer",
        "Theirs adds 0.001 to the logarithm of the scale, in float64, and has no "
        "bounds. Ours, in float32, is 0.05 % off after 10,000 good steps in a row.",
    ),
    "nemo": _row(
        (2.0**16, 2000, None, 0.5, ..., ("good",), _NO_FLOOR),
        "NeMo 2.2.1, nemo/lightning/_strategy_lib.py, GradScaler",
        "Theirs falls to 0. Its load_state_dict misspells a key: after a restore the "
        "next bad step always lowers its scale, whatever the hysteresis.",
    ),
    "mpx": _row(
        (..., 2000, None, None, None, None, None, 65504.0),
        "mixed-precision-for-JAX 0.1.8, mpx/_loss_scaling.py, DynamicLossScaling",
        "Theirs has no default floor; its README gives 1.",
    ),
    "mmcv": _row(
        (2.0**32, 1000),
        "mmcv 1.7.2, mmcv/runner/fp16_utils.py, LossScaler",
        "Theirs grows to infinity. Fp16OptimizerHook uses it before torch 1.6, and "
        "torch's GradScaler since; its default, 512, is a fixed scale.",
    ),
    "fairseq": _row(
        (2.0**15, 2000, None, None, None, None, 2.0**-13),
        "fairseq 0.12.2, fairseq/optim/dynamic_loss_scaler.py, DynamicLossScaler; "
        "its arguments in training: fairseq/optim/fp16_optimizer.py",
        "Theirs grows to infinity. It ends the run when the scale would be 1e-4 or "
        "less: our floor is the last power of two above. Its trainer starts at 2**7 "
        "and grows after 2**14 / (workers * update_freq) steps. Its tolerance, 0 by "
        "default, is `overflow_tolerance`.",
    ),
    "chainer": _row(
        (1.0, 1000, None, 0.5, None, None, None, 65504.0),
        "Chainer 7.8.1, chainer/optimizer.py, Optimizer.loss_scaling",
        "After the first bad step theirs grows by 2**(1 / 1000) at each good step, "
        "ours by 2 after 1000 in a row. No snapshot holds theirs: it starts again.",
        search_period=1,
    ),
    "stylegan2": _row(
        (2.0**64, 1, 2.0**0.0005, 0.5, None, None, _NO_FLOOR),
        "StyleGAN2 at 59af465, dnnlib/tflib/optimizer.py, Optimizer",
        "Theirs adds 0.0005 to the logarithm of the scale, in float32, and has no "
        "bounds.",
    ),
    "director": _row(
        (1e4, 1001, None, 0.5, None, None, 1e-4, 1e4),
        "Director at a6a649e, embodied/agents/director/tfutils.py, Optimizer",
        "Theirs grows on the step after 1000 good ones. It ends the run when the "
        "scaled loss is not finite. DreamerV2 uses Keras's schedule: tensorflow.",
    ),
    "dalle": _row(
        (2.0**13, 1, 2.0**0.001, 2.0**-0.5, None, None, 2.0**7, 2.0**24),
        "Ramesh et al. 2021, Zero-Shot Text-to-Image Generation, arXiv 2102.12092, "
        "appendix D; its code is not public",
        "Theirs has a scale for each residual block, and multiplies start and bounds "
        "by the number of replicas, whose gradients it averages. Ours is one scale for "
        "the whole model.",
        backoff_cooldown=125,
    ),
}
#: Name -> `Preset`.
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {"dynamic": _NAMED["tensorflow"], **_NAMED}
)


def preset_name(argument: str, name: str) -> str:
    """Returns `name`, a key of the table, or raises an error about `argument`."""
    if name not in PRESETS:
        raise ValueError(
            f"`{argument}` must be the name of a preset, got {name!r}."
            f"{arguments.did_you_mean(name, PRESETS)} The table "
            "lossscale.presets.PRESETS has all names."
        )
    return name


def preset_arguments(name: str, overrides: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns a preset's arguments with `overrides`."""
    if not isinstance(name, str):
        raise TypeError(
            f"`name` must be the name of a preset, got {arguments.shown(name)}."
        )
    preset = PRESETS[preset_name("name", name)]
    for argument in preset.asks_for:
        if argument not in overrides:
            listed = ", ".join([repr(name), *(f"{n}=..." for n in preset.asks_for)])
            raise TypeError(
                f"`{argument}` must be given with the preset {name!r}, which has no "
                f"default for it. Write DynamicLossScale.from_preset({listed})."
            )
    return {**preset.arguments, **overrides}
