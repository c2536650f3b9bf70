"""One family of each Keras: the optimizers have no part in these tools."""

import pytest
import tensorflow as tf
from installed import each_keras


@pytest.fixture(params=each_keras(), ids=lambda family: family.name)
def family(request):
    yield request.param
    request.param.keras.mixed_precision.set_global_policy("float32")
    tf.random.set_seed(None)
