"""Layers of the Kerases that compute in ways of their own: how made, and what goes in.

Where a layer may have a bias it has none: a bias's gradient is scaled whatever the
layer does, and could speak for the weights'.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, NamedTuple, Tuple

import numpy as np

FLAT, ROWS, IMAGE = (4,), (6, 3), (6, 6, 3)


def _alone(layer, x, *_):
    return layer(x)


def _with_another(layer, x, other, _):
    return layer([x, other])


def _then_embedded(layer, x, _, layers):
    return layers.Embedding(8, 3)(layer(x))


class Row(NamedTuple):
    """How a layer is trained.

    Attributes:
      shape: Of the input, without the batch.
      args: Of the constructor. Functions are called with the module of layers.
      kwargs: Of the constructor.
      call: Returns the output for the layer, the input, another one like it, and the
        module of layers.
      dtype: Of the input.
      is_first: Whether nothing that is trained comes before it.
    """

    shape: Tuple[int, ...]
    args: Tuple[Any, ...] = ()
    kwargs: Dict[str, Any] = {}  # noqa: RUF012 - a tuple's default, never changed
    call: Callable[..., Any] = _alone
    dtype: str = "float32"
    is_first: bool = False

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


def row(shape, *args, call=_alone, dtype="float32", is_first=False, **kwargs):
    return Row(shape, args, kwargs, call, dtype, is_first)


def _dense(layers):
    return layers.Dense(3, use_bias=False)


#: Name -> how it is trained. Those of one kind compute alike: one of them is here, and
#: none that is a single operation of expressions.py.
LAYERS = {
    "Dense": row(FLAT, 3, activation="relu"),
    "EinsumDense": row(FLAT, "ab,bc->ac", output_shape=3),
    "Embedding": row(FLAT, 8, 3, dtype="int32", is_first=True),
    "ReversibleEmbedding": row(FLAT, 8, 3, dtype="int32", is_first=True),
    "Masking": row(ROWS, 0.0),
    "TimeDistributed": row(ROWS, _dense),
    "SpectralNormalization": row(FLAT, _dense),
    "Dropout": row(FLAT, 0.5),
    "LocallyConnected2D": row(IMAGE, 2, 3),
    # Activations and normalizations
    "PReLU": row(FLAT),
    "BatchNormalization": row(IMAGE),
    "LayerNormalization": row(ROWS),
    "RMSNormalization": row(ROWS),
    "GroupNormalization": row(IMAGE, groups=3),
    # Of two inputs
    "Dot": row(ROWS, 2, call=_with_another),
    "AdditiveAttention": row(ROWS, call=_with_another),
    "MultiHeadAttention": row(
        ROWS, 2, 3, call=lambda layer, x, other, _: layer(x, other)
    ),
    # Convolutions and pooling
    "Conv2D": row(IMAGE, 2, 3, padding="same"),
    "Conv2DTranspose": row(IMAGE, 2, 3, strides=2),
    "SeparableConv2D": row(IMAGE, 2, 3),
    # Loops
    "GRU": row(ROWS, 3),
    "LSTM": row(ROWS, 3),
    "RNN": row(ROWS, lambda layers: layers.SimpleRNNCell(3, use_bias=False)),
    "Bidirectional": row(
        ROWS, lambda layers: layers.GRU(3, use_bias=False, return_sequences=True)
    ),
    "ConvLSTM2D": row((3, 4, 4, 2), 2, 3),
    # Of integers, words and sound
    "Discretization": row(FLAT, [0.2, 0.5], is_first=True, call=_then_embedded),
    "Hashing": row(FLAT, 8, dtype="string", is_first=True, call=_then_embedded),
    "MelSpectrogram": row(
        (64,), 16, 8, num_mel_bins=4, sampling_rate=64, is_first=True
    ),
    # Of images, drawn anew in each step
    "RandomFlip": row(IMAGE),
    "RandomRotation": row(IMAGE, 0.2),
    "MixUp": row(IMAGE),
}
#: What the newest Keras 2 cannot train: its own check takes no InputSpec.
FAIL_IN_KERAS_2 = {"SpectralNormalization"}
