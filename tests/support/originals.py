"""Other systems' loss scalers behind one interface: a program that answers requests.

    python tests/support/originals.py NAME JSON

Each request has the `parameters` of a scaler and the `flags` of its steps. A process
for each system: Paddle crashes where TensorFlow has been imported before it.
"""

import inspect
import json
import sys

import numpy as np

# Each makes a scaler, and returns a function that takes a step and returns the scale
# after it, and the scaler's defaults by the names of our arguments.


def tensorflow(scale=2.0**15, growth=2.0, period=2000):
    """tf.compat.v1.mixed_precision.DynamicLossScale."""
    import tensorflow as tf

    cls = tf.compat.v1.mixed_precision.DynamicLossScale
    scaler = cls(scale, period, growth)

    def step(is_finite):
        scaler.update([tf.constant(1.0 if is_finite else np.inf)])
        return float(scaler())

    return step, arguments_of(cls)


def keras(name, scale, period):
    """Returns what takes a step of the LossScaleOptimizer of a Keras, and its class."""
    import tensorflow as tf
    from installed import families
    from models import variable_of

    family = next(f for f in families() if f.name.startswith(name))
    cls = family.keras.mixed_precision.LossScaleOptimizer
    inner, weight = family.optimizers.SGD(0.0), variable_of(family, 0.0)
    optimizer = cls(inner, initial_scale=scale, dynamic_growth_steps=period)

    def step(is_finite):
        grad = tf.constant(1.0 if is_finite else np.inf)
        optimizer.apply_gradients([(grad, weight)])
        found = getattr(optimizer, "dynamic_scale", None)
        return float(optimizer.loss_scale if found is None else found.numpy())

    return step, cls


def keras3(scale=2.0**15, period=2000):
    step, cls = keras("keras3", scale, period)
    return step, arguments_of(
        cls, initial_loss_scale="initial_scale", increment_period="dynamic_growth_steps"
    )


def keras2(scale=2.0**15, period=2000):
    step, cls = keras("keras2", scale, period)
    module = sys.modules[cls.__module__]
    start, steps = module._DEFAULT_INITIAL_SCALE, module._DEFAULT_GROWTH_STEPS
    return step, {"initial_loss_scale": start, "increment_period": steps}


def torch(scale=2.0**16, growth=2.0, backoff=0.5, period=2000):
    """torch.amp.GradScaler on the CPU."""
    import torch

    cls = torch.amp.GradScaler
    scaler = cls("cpu", scale, growth, backoff, period)
    weight = torch.nn.Parameter(torch.zeros([]))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def step(is_finite):
        scaler.scale(torch.zeros([]))
        weight.grad = torch.tensor(1.0 if is_finite else float("inf"))
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    return step, arguments_of(
        cls,
        initial_loss_scale="init_scale",
        increment_period="growth_interval",
        multiplier="growth_factor",
        backoff_factor="backoff_factor",
    )


def paddle(scale=2.0**16, growth=2.0, backoff=0.5, period=2000, bad=1):
    """paddle.amp.GradScaler's own bookkeeping, told what it would have found."""
    import paddle

    # A bad step is printed with float(array of shape [1]), which NumPy 2.4 refuses
    # (Paddle 3.3.1). The name is looked up in its module before the built-in one.
    paddle.amp.grad_scaler.float = lambda tensor: np.asarray(tensor).item()
    scaler = paddle.amp.GradScaler()
    # Without a GPU the constructor turns the scaler off, and sets nothing.
    scaler._enable = True
    state = {"scale": np.array([scale], np.float32), "use_dynamic_loss_scaling": True}
    state.update(incr_ratio=growth, incr_every_n_steps=period, incr_count=0)
    state.update(decr_ratio=backoff, decr_every_n_nan_or_inf=bad, decr_count=0)
    scaler.load_state_dict(state)

    def step(is_finite):
        scaler._cache_found_inf = not is_finite
        scaler._update()
        return scaler._scale.item()

    return step, arguments_of(
        paddle.amp.GradScaler,
        initial_loss_scale="init_loss_scaling",
        increment_period="incr_every_n_steps",
        multiplier="incr_ratio",
        backoff_factor="decr_ratio",
        hysteresis="decr_every_n_nan_or_inf",
    )


def jmp(scale=2.0**15, growth=2, period=2000, floor=1.0):
    """jmp.DynamicLossScale."""
    from jax.numpy import float32, int32
    from jmp import DynamicLossScale

    scale, floor = float32(scale), float32(floor)
    scaler = DynamicLossScale(scale, int32(0), period, growth, floor)
    return adjusting(scaler, "loss_scale")


def mpx(scale=2.0**15, growth=2, period=2000, floor=1.0):
    """mpx.DynamicLossScaling, which is jmp's under other names."""
    from jax.numpy import float32
    from mpx import DynamicLossScaling

    scaler = DynamicLossScaling(float32(scale), float32(floor), growth, period)
    return adjusting(scaler, "loss_scaling")


def adjusting(scaler, value):
    def step(is_finite):
        nonlocal scaler
        scaler = scaler.adjust(np.asarray(is_finite))
        return float(getattr(scaler, value))

    names = {"increment_period": "period", "multiplier": "factor"}
    return step, arguments_of(type(scaler), **names)


def flax(scale=2.0**16, growth=2.0, backoff=0.5, period=2000):
    """flax.training.dynamic_scale.DynamicScale."""
    from flax.training.dynamic_scale import DynamicScale
    from jax.numpy import float32

    scaler = DynamicScale(growth, backoff, period, scale=float32(scale))
    found = arguments_of(
        DynamicScale,
        initial_loss_scale="scale",
        increment_period="growth_interval",
        multiplier="growth_factor",
        backoff_factor="backoff_factor",
        min_loss_scale="minimum_scale",
    )
    found["increment_period"] += 1

    def step(is_finite):
        nonlocal scaler
        factor = float32(1.0 if is_finite else np.inf)
        differentiated = scaler.value_and_grad(lambda weight: weight * factor)
        scaler, *_ = differentiated(float32(1.0))
        return float(scaler.scale)

    return step, found


#: Name of the preset, or of the package -> the original.
ORIGINALS = {"tensorflow": tensorflow, "tf_keras": keras2, "keras3": keras3}
ORIGINALS.update(torch=torch, paddle=paddle, jmp=jmp, flax=flax, mpx=mpx)


def arguments_of(cls, **names):
    """Returns the defaults of a constructor, by our names of its arguments, or all."""
    found = {p.name: p.default for p in inspect.signature(cls).parameters.values()}
    return {ours: found[theirs] for ours, theirs in names.items()} or found


def main():
    """Prints, of each request, the `scales` after its steps, and the `defaults`."""
    make, out, answers = ORIGINALS[sys.argv[1]], sys.stdout, []
    sys.stdout = sys.stderr  # Paddle prints
    for request in json.loads(sys.argv[2]):
        step, defaults = make(**request["parameters"])
        scales = [step(flag) for flag in request["flags"]]
        answers.append({"scales": scales, "defaults": defaults})
    print(json.dumps(answers, default=lambda a: a.tolist()), file=out)


if __name__ == "__main__":
    main()
