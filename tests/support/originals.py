"""Other frameworks' loss scalers behind one interface, and a process to run them.

`python tests/support/originals.py torch` answers one JSON request per line. Each has a
process of its own: Paddle crashes where TensorFlow has been imported before it.
"""

from __future__ import annotations

import inspect
import json
import sys

import numpy as np


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
        return paddles_defaults(self.cls)


class Jmp:
    """jmp.DynamicLossScale."""

    def __init__(self, scale=2.0**15, growth=2, period=2000, floor=1.0):
        import jax.numpy as jnp
        import jmp

        self.array = jnp.asarray
        self.scaler = jmp.DynamicLossScale(
            jnp.asarray(scale, jnp.float32),
            jnp.zeros([], jnp.int32),
            period,
            growth,
            jnp.asarray(floor, jnp.float32),
        )

    def step(self, is_finite):
        self.scaler = self.scaler.adjust(self.array(is_finite))
        return float(self.scaler.loss_scale)

    def defaults(self):
        found = arguments_of(type(self.scaler))
        return {"increment_period": found["period"], "multiplier": found["factor"]}


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


class Mpx(Jmp):
    """mpx.DynamicLossScaling, which is jmp's under other names."""

    def __init__(self, scale=2.0**15, growth=2, period=2000, floor=1.0):
        import jax.numpy as jnp
        import mpx

        self.array = jnp.asarray
        self.scaler = mpx.DynamicLossScaling(
            jnp.asarray(scale, jnp.float32),
            jnp.asarray(floor, jnp.float32),
            growth,
            period,
        )

    def step(self, is_finite):
        self.scaler = self.scaler.adjust(self.array(is_finite))
        return float(self.scaler.loss_scaling)


#: Name of the preset -> the class.
ORIGINALS = {
    "torch": Torch,
    "paddle": Paddle,
    "jmp": Jmp,
    "flax": Flax,
    "mpx": Mpx,
}


def arguments_of(cls):
    """Returns the defaults of a constructor."""
    return {p.name: p.default for p in inspect.signature(cls).parameters.values()}


def paddles_defaults(function):
    """Returns our arguments' values, from the signature of one of Paddle's two."""
    found = arguments_of(function)
    return {
        "initial_loss_scale": found["init_loss_scaling"],
        "increment_period": found["incr_every_n_steps"],
        "multiplier": found["incr_ratio"],
        "backoff_factor": found["decr_ratio"],
        "hysteresis": found["decr_every_n_nan_or_inf"],
    }


def answer(cls, request):
    """Runs an original.

    Args:
      cls: The original.
      request: A dict: `parameters` of the constructor, and the `flags` of the steps.

    Returns:
      `scales`, one per step, and the `defaults`.
    """
    original = cls(**request["parameters"])
    scales = [original.step(flag) for flag in request["flags"]]
    return {"scales": scales, "defaults": original.defaults()}


def main():
    """Answers requests, one per line."""
    cls, out = ORIGINALS[sys.argv[1]], sys.stdout
    sys.stdout = sys.stderr  # Paddle prints
    for line in sys.stdin:
        found = answer(cls, json.loads(line))
        print(json.dumps(found, default=lambda a: a.tolist()), file=out, flush=True)


if __name__ == "__main__":
    main()
