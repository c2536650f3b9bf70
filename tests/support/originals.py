"""Other systems' loss scalers behind one interface: a program that answers requests.

    python tests/support/originals.py NAME JSON

Each request has the `parameters` of a scaler and the `flags` of its steps. A process
for each system: Paddle crashes where TensorFlow has been imported before it.
"""

from __future__ import annotations

import inspect
import json
import sys

import numpy as np


class TensorFlow:
    """tf.compat.v1.mixed_precision.DynamicLossScale."""

    def __init__(self, scale=2.0**15, growth=2.0, period=2000):
        import tensorflow as tf

        self.tensor = tf.constant
        self.cls = tf.compat.v1.mixed_precision.DynamicLossScale
        self.scaler = self.cls(scale, period, growth)

    def step(self, is_finite):
        self.scaler.update([self.tensor(1.0 if is_finite else np.inf)])
        return float(self.scaler())

    def defaults(self):
        return arguments_of(self.cls)


class Keras3:
    """The LossScaleOptimizer of Keras 3."""

    name = "keras3"

    def __init__(self, scale=2.0**15, period=2000):
        from installed import families
        from models import variable_of

        family = next(f for f in families() if f.name.startswith(self.name))
        self.cls = family.keras.mixed_precision.LossScaleOptimizer
        inner, self.weight = family.optimizers.SGD(0.0), variable_of(family, 0.0)
        options = {"initial_scale": scale, "dynamic_growth_steps": period}
        self.optimizer = self.cls(inner, **options)

    def step(self, is_finite):
        import tensorflow as tf

        grad = tf.constant(1.0 if is_finite else np.inf)
        self.optimizer.apply_gradients([(grad, self.weight)])
        return self.scale()

    def scale(self):
        return float(self.optimizer.dynamic_scale.numpy())

    def defaults(self):
        found = arguments_of(self.cls)
        return {
            "initial_loss_scale": found["initial_scale"],
            "increment_period": found["dynamic_growth_steps"],
        }


class Keras2(Keras3):
    """That of Keras 2."""

    name = "keras2"

    def scale(self):
        return float(self.optimizer.loss_scale)

    def defaults(self):
        module = sys.modules[self.cls.__module__]
        return {
            "initial_loss_scale": module._DEFAULT_INITIAL_SCALE,
            "increment_period": module._DEFAULT_GROWTH_STEPS,
        }


class Torch:
    """torch.amp.GradScaler on the CPU."""

    def __init__(self, scale=2.0**16, growth=2.0, backoff=0.5, period=2000):
        import torch

        self.torch = torch
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=scale,
            growth_factor=growth,
            backoff_factor=backoff,
            growth_interval=period,
        )
        self.weight = torch.nn.Parameter(torch.zeros([]))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)

    def step(self, is_finite):
        self.scaler.scale(self.torch.zeros([]))
        self.weight.grad = self.torch.tensor(1.0 if is_finite else float("inf"))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()

    def defaults(self):
        state = self.torch.amp.GradScaler("cpu").state_dict()
        return {
            "initial_loss_scale": state["scale"],
            "increment_period": state["growth_interval"],
            "multiplier": state["growth_factor"],
            "backoff_factor": state["backoff_factor"],
        }


class Paddle:
    """paddle.amp.GradScaler's own bookkeeping, told what it would have found."""

    def __init__(self, scale=2.0**16, growth=2.0, backoff=0.5, period=2000, bad=1):
        import paddle

        # A bad step is printed with float(array of shape [1]), which NumPy 2.4 refuses
        # (Paddle 3.3.1). The name is looked up in its module before the built-in one.
        paddle.amp.grad_scaler.float = lambda tensor: np.asarray(tensor).item()
        self.cls = paddle.amp.GradScaler
        self.scaler = self.cls()
        # Without a GPU the constructor turns the scaler off, and sets nothing.
        self.scaler._enable = True
        state = {
            "scale": np.array([scale], np.float32),
            "incr_ratio": growth,
            "decr_ratio": backoff,
            "incr_every_n_steps": period,
            "decr_every_n_nan_or_inf": bad,
            "incr_count": 0,
            "decr_count": 0,
            "use_dynamic_loss_scaling": True,
        }
        self.scaler.load_state_dict(state)

    def step(self, is_finite):
        self.scaler._cache_found_inf = not is_finite
        self.scaler._update()
        return self.scaler._scale.item()

    def defaults(self):
        found = arguments_of(self.cls)
        return {
            "initial_loss_scale": found["init_loss_scaling"],
            "increment_period": found["incr_every_n_steps"],
            "multiplier": found["incr_ratio"],
            "backoff_factor": found["decr_ratio"],
            "hysteresis": found["decr_every_n_nan_or_inf"],
        }


class Jmp:
    """jmp.DynamicLossScale."""

    value = "loss_scale"

    def __init__(self, scale=2.0**15, growth=2, period=2000, floor=1.0):
        import jax.numpy as jnp

        self.jnp = jnp
        scale, floor = (jnp.asarray(each, jnp.float32) for each in (scale, floor))
        self.scaler = self.made(scale, floor, growth, period)

    def made(self, scale, floor, growth, period):
        from jmp import DynamicLossScale

        counter = self.jnp.zeros([], self.jnp.int32)
        return DynamicLossScale(scale, counter, period, growth, floor)

    def step(self, is_finite):
        self.scaler = self.scaler.adjust(self.jnp.asarray(is_finite))
        return float(getattr(self.scaler, self.value))

    def defaults(self):
        found = arguments_of(type(self.scaler))
        return {"increment_period": found["period"], "multiplier": found["factor"]}


class Mpx(Jmp):
    """mpx.DynamicLossScaling, which is jmp's under other names."""

    value = "loss_scaling"

    def made(self, scale, floor, growth, period):
        from mpx import DynamicLossScaling

        return DynamicLossScaling(scale, floor, growth, period)


class Flax:
    """flax.training.dynamic_scale.DynamicScale."""

    def __init__(self, scale=2.0**16, growth=2.0, backoff=0.5, period=2000):
        import jax.numpy as jnp
        from flax.training.dynamic_scale import DynamicScale

        self.float32 = jnp.float32
        self.scaler = DynamicScale(
            growth_factor=growth,
            backoff_factor=backoff,
            growth_interval=period,
            scale=jnp.float32(scale),
        )

    def step(self, is_finite):
        factor = self.float32(1.0 if is_finite else np.inf)
        differentiated = self.scaler.value_and_grad(lambda weight: weight * factor)
        self.scaler, *_ = differentiated(self.float32(1.0))
        return float(self.scaler.scale)

    def defaults(self):
        scaler = type(self.scaler)()
        return {
            "initial_loss_scale": scaler.scale,
            "increment_period": scaler.growth_interval + 1,
            "multiplier": scaler.growth_factor,
            "backoff_factor": scaler.backoff_factor,
            "min_loss_scale": float(scaler.minimum_scale),
        }


#: Name of the preset, or of the package -> the class.
ORIGINALS = {
    "tensorflow": TensorFlow,
    "tf_keras": Keras2,
    "keras3": Keras3,
    "torch": Torch,
    "paddle": Paddle,
    "jmp": Jmp,
    "flax": Flax,
    "mpx": Mpx,
}


def arguments_of(cls):
    """Returns the defaults of a constructor."""
    return {p.name: p.default for p in inspect.signature(cls).parameters.values()}


def main():
    """Prints, of each request, the `scales` after its steps, and the `defaults`."""
    cls, out, answers = ORIGINALS[sys.argv[1]], sys.stdout, []
    sys.stdout = sys.stderr  # Paddle prints
    for request in json.loads(sys.argv[2]):
        original = cls(**request["parameters"])
        scales = [original.step(flag) for flag in request["flags"]]
        answers.append({"scales": scales, "defaults": original.defaults()})
    print(json.dumps(answers, default=lambda a: a.tolist()), file=out)


if __name__ == "__main__":
    main()
