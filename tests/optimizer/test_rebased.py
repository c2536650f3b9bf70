"""Subclasses of a Keras's own wrapper run when they are derived from ours instead."""

import pytest
from limits import TENSORFLOW
from models import data, regression

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer


class OfKeras2(LossScaleOptimizer):
    """As programs derive from Keras 2's wrapper."""

    def __init__(
        self,
        inner_optimizer,
        dynamic=True,
        initial_scale=None,
        dynamic_growth_steps=None,
        extra=1.0,
    ):
        super().__init__(inner_optimizer, dynamic, initial_scale, dynamic_growth_steps)
        self._extra, self._steps = extra, 0

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        self._steps += 1
        return super().apply_gradients(grads_and_vars, *args, **kwargs)

    def get_config(self):
        return {**super().get_config(), "extra": self._extra}


class ByName(LossScaleOptimizer):
    """Hands names over, as those do that add nothing to the constructor."""

    def __init__(self, optimizer, **kwargs):
        super().__init__(inner_optimizer=optimizer, **kwargs)


def test_one_of_keras_2s_trains_and_is_saved(family, rng, tmp_path):
    x, y = data(rng)
    optimizer = OfKeras2(family.optimizers.SGD(2.0**-3), True, 64.0, 3, extra=5.0)
    assert isinstance(optimizer, OfKeras2)
    model = regression(family, optimizer, "mixed_float16")
    assert model.optimizer is optimizer  # `compile` wraps it no more
    model.fit(x, y, batch_size=16, verbose=0)
    assert float(optimizer.loss_scale) == 128.0
    assert optimizer._steps > 0

    config = optimizer.get_config()
    for cls in (OfKeras2, type(optimizer)):
        again = cls.from_config(config)
        assert type(again) is type(optimizer)
        assert again._extra == 5.0
        assert again.loss_scale.get_config() == optimizer.loss_scale.get_config()
    if family.name == "keras2-legacy" or not hasattr(family.keras, "saving"):
        return  # such files do not hold their state, or are none
    path = str(tmp_path / "model.keras")
    model.save(path)
    load, custom = family.keras.models.load_model, {"OfKeras2": OfKeras2}
    loaded = load(path, custom_objects=custom).optimizer
    assert isinstance(loaded, OfKeras2)
    assert (loaded._extra, float(loaded.loss_scale)) == (5.0, 128.0)
    assert int(loaded.iterations.numpy()) == 4


def test_a_registered_one_is_found_by_its_name(family):
    keras = family.keras
    registry = keras.saving if family.name == "keras3" else keras.utils

    @registry.register_keras_serializable("others", f"Mine_{family.name}")
    class Mine(OfKeras2):
        pass

    optimizer = Mine(family.optimizers.SGD(0.25), False, 64.0)
    name = registry.get_registered_name(type(optimizer))
    refuses = TENSORFLOW < (2, 11)  # a name that is taken: seen on 2.4 and 2.10
    assert name == ("Mine" if refuses else f"others>Mine_{family.name}")
    found = registry.get_registered_object(f"others>Mine_{family.name}")
    again = found.from_config(optimizer.get_config())
    assert isinstance(again, Mine)
    assert isinstance(again.loss_scale, FixedLossScale)
    assert float(again.loss_scale) == 64.0


def test_others_are_called_as_they_are(family):
    class OfKeras3(LossScaleOptimizer):
        """As programs derive from Keras 3's wrapper."""

        def __init__(self, inner_optimizer, initial_scale=2.0**15, steps=2000):
            super().__init__(inner_optimizer, initial_scale, steps)

    sgd = family.optimizers.SGD
    scale = OfKeras3(sgd(0.25), 64.0, 7).loss_scale
    assert (float(scale), scale.increment_period) == (64.0, 7)
    for arguments in ({"dynamic": False, "initial_scale": 64.0}, {"loss_scale": 64.0}):
        assert float(ByName(optimizer=sgd(0.25), **arguments).loss_scale) == 64.0
    own = family.keras.mixed_precision.LossScaleOptimizer(sgd(0.25), initial_scale=64.0)
    optimizer = OfKeras2.from_keras(own)
    assert isinstance(optimizer, OfKeras2)
    assert float(optimizer.loss_scale) == 64.0


def test_what_cannot_be_is_told_with_the_line_to_change(family):
    class WithoutOne(LossScaleOptimizer):
        def __init__(self, rate):
            super().__init__(family.optimizers.SGD(rate))

    told = r"`inner_optimizer` must .* WithoutOne.*type\("
    with pytest.raises(TypeError, match=told):
        WithoutOne(0.25)
    scale = DynamicLossScale(64.0, multiplier=4.0)
    config = LossScaleOptimizer(family.optimizers.SGD(0.25), scale).get_config()
    with pytest.raises(TypeError, match=r"`loss_scale` must .* Give the constructor"):
        OfKeras2.from_config(config)
