"""Layers of the Kerases that compute in ways of their own: how made, and what goes in.

Where a layer may have a bias it has none: a bias's gradient is scaled whatever the
layer does, and could speak for the weights'.
"""

from __future__ import annotations

import inspect

import numpy as np

FLAT, ROWS, IMAGE = (4,), (6, 3), (6, 6, 3)


def _alone(layer, x, *_):
    return layer(x)


def _with_another(layer, x, other, _):
    return layer([x, other])


def _then_embedded(layer, x, _, layers):
    return layers.Embedding(8, 3)(layer(x))


class Row:
    """How a layer is trained.

    Attributes:
      shape: Of the input, without the batch.
      args, kwargs: Of the constructor. Functions are called with the module of layers.
      call: Returns the output for the layer, the input, another one like it, and the
        module of layers.
      dtype: Of the input.
      is_first: Whether nothing that is trained comes before it.
    """

    def __init__(
        self, shape, *args, call=_alone, dtype="float32", is_first=False, **kwargs
    ):
        self.shape, self.args, self.kwargs = shape, args, kwargs
        self.call, self.dtype, self.is_first = call, dtype, is_first

    def make(self, layers, name):
        """Returns the layer of that name."""
        layer_class = getattr(layers, name)
        kwargs = {key: _made(value, layers) for key, value in self.kwargs.items()}
        for key, value in {"use_bias": False, "seed": 3, "value_range": (0, 1)}.items():
            if key in inspect.signature(layer_class.__init__).parameters:
                kwargs.setdefault(key, value)
        return layer_class(*(_made(arg, layers) for arg in self.args), **kwargs)

    def inputs(self, rows, rng):
        """Returns so many rows of what the layer takes."""
        if self.dtype == "float32":
            return rng.uniform(0.1, 0.9, (rows, *self.shape)).astype(np.float32)
        numbers = rng.integers(1, 6, (rows, *self.shape))
        if self.dtype == "string":
            return np.array(list("abcdef"), object)[numbers]
        return numbers.astype(self.dtype)


def _made(argument, layers):
    return argument(layers) if inspect.isfunction(argument) else argument


def _dense(layers):
    return layers.Dense(3, use_bias=False)


#: Name -> how it is trained. Those of one kind compute alike: one of them is here, and
#: none that is a single operation of expressions.py.
LAYERS = {
    "Dense": Row(FLAT, 3, activation="relu"),
    "EinsumDense": Row(FLAT, "ab,bc->ac", output_shape=3),
    "Embedding": Row(FLAT, 8, 3, dtype="int32", is_first=True),
    "ReversibleEmbedding": Row(FLAT, 8, 3, dtype="int32", is_first=True),
    "Masking": Row(ROWS, 0.0),
    "TimeDistributed": Row(ROWS, _dense),
    "SpectralNormalization": Row(FLAT, _dense),
    "Dropout": Row(FLAT, 0.5),
    "LocallyConnected2D": Row(IMAGE, 2, 3),
    # Activations and normalizations
    "PReLU": Row(FLAT),
    "BatchNormalization": Row(IMAGE),
    "LayerNormalization": Row(ROWS),
    "RMSNormalization": Row(ROWS),
    "GroupNormalization": Row(IMAGE, groups=3),
    # Of two inputs
    "Dot": Row(ROWS, 2, call=_with_another),
    "AdditiveAttention": Row(ROWS, call=_with_another),
    "MultiHeadAttention": Row(
        ROWS, 2, 3, call=lambda layer, x, other, _: layer(x, other)
    ),
    # Convolutions and pooling
    "Conv2D": Row(IMAGE, 2, 3, padding="same"),
    "Conv2DTranspose": Row(IMAGE, 2, 3, strides=2),
    "SeparableConv2D": Row(IMAGE, 2, 3),
    # Loops
    "GRU": Row(ROWS, 3),
    "LSTM": Row(ROWS, 3),
    "RNN": Row(ROWS, lambda layers: layers.SimpleRNNCell(3, use_bias=False)),
    "Bidirectional": Row(
        ROWS, lambda layers: layers.GRU(3, use_bias=False, return_sequences=True)
    ),
    "ConvLSTM2D": Row((3, 4, 4, 2), 2, 3),
    # Of integers, words and sound
    "Discretization": Row(FLAT, [0.2, 0.5], is_first=True, call=_then_embedded),
    "Hashing": Row(FLAT, 8, dtype="string", is_first=True, call=_then_embedded),
    "MelSpectrogram": Row(
        (64,), 16, 8, num_mel_bins=4, sampling_rate=64, is_first=True
    ),
    # Of images, drawn anew in each step
    "RandomFlip": Row(IMAGE),
    "RandomRotation": Row(IMAGE, 0.2),
    "MixUp": Row(IMAGE),
}
#: What the newest Keras 2 cannot train: its own check takes no InputSpec.
FAIL_IN_KERAS_2 = {"SpectralNormalization"}
