"""Every layer of the Kerases: how it is made and what goes in, or why it is left out.

Where a layer may have a bias it has none: a bias's gradient is scaled whatever the
layer does, and could speak for the weights'.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, NamedTuple, Tuple

import numpy as np
import tensorflow as tf

FLAT, ROWS = (4,), (6, 3)
IMAGE, VOLUME = (6, 6, 3), (4, 4, 4, 2)
_BY_RANK = {"1D": ROWS, "2D": IMAGE, "3D": VOLUME}


def _alone(layer, x, *_):
    return layer(x)


def _with_another(layer, x, other, _):
    return layer([x, other])


def _as_cell(layer, x, _, layers):
    return layers.RNN(layer)(x)


def _then_embedded(layer, x, _, layers):
    return layers.Embedding(8, 3)(layer(x))


def _then_averaged(layer, x, _, layers):
    return layers.GlobalAveragePooling2D()(layer(x))


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


def by_rank(name, *args, ranks="123", **kwargs):
    """Returns rows of layers for one, two and three dimensions."""
    names = [f"{name}{rank}D" for rank in ranks]
    return {each: row(_BY_RANK[each[-2:]], *args, **kwargs) for each in names}


def images(names, *args, **kwargs):
    return {name: row(IMAGE, *args, **kwargs) for name in names.split()}


def _dense(layers):
    return layers.Dense(3, use_bias=False)


def _recurrent(layers):
    return layers.GRU(3, use_bias=False, return_sequences=True)


def _cell(layers):
    return layers.SimpleRNNCell(3, use_bias=False)


_CORE = {
    "Dense": row(FLAT, 3, activation="relu"),
    "EinsumDense": row(FLAT, "ab,bc->ac", output_shape=3),
    "Embedding": row(FLAT, 8, 3, dtype="int32", is_first=True),
    "DynamicEmbedding": row(
        (3,), 8, 3, lambda _: tf.range(8), dtype="int32", is_first=True
    ),
    "ReversibleEmbedding": row(FLAT, 8, 3, dtype="int32", is_first=True),
    "Activation": row(FLAT, "tanh"),
    "ThresholdedReLU": row(FLAT, 0.1),
    "ActivityRegularization": row(FLAT, l2=0.01),
    "Identity": row(FLAT),
    "Lambda": row(FLAT, lambda _: lambda x: x * 2.0 + 1.0),
    "Masking": row(ROWS, 0.0),
    "Flatten": row(IMAGE),
    "Permute": row(ROWS, (2, 1)),
    "RepeatVector": row(FLAT, 3),
    "Reshape": row(FLAT, (2, 2)),
    "TimeDistributed": row(ROWS, _dense),
    "SpectralNormalization": row(FLAT, _dense),
    "Dropout": row(FLAT, 0.5),
    "AlphaDropout": row(FLAT, 0.5),
    "GaussianDropout": row(FLAT, 0.5),
    "GaussianNoise": row(FLAT, 0.5),
    **by_rank("SpatialDropout", 0.5),
    "LocallyConnected1D": row(ROWS, 2, 3),
    "LocallyConnected2D": row(IMAGE, 2, 3),
    "Pipeline": row(FLAT, lambda layers: [_dense(layers), layers.ReLU()]),
}
_ACTIVATIONS = {
    name: row(FLAT) for name in ["ReLU", "LeakyReLU", "ELU", "PReLU", "Softmax"]
}
_NORMALIZATIONS = {
    "BatchNormalization": row(IMAGE),
    "SyncBatchNormalization": row(IMAGE),
    "LayerNormalization": row(ROWS),
    "RMSNormalization": row(ROWS),
    "UnitNormalization": row(ROWS),
    "GroupNormalization": row(IMAGE, groups=3),
    "Normalization": row(FLAT, mean=0.5, variance=2.0),
    "Rescaling": row(FLAT, 0.5, 1.0),
}
_MERGING = {
    **{
        name: row(ROWS, call=_with_another)
        for name in ["Add", "Average", "Concatenate", "Multiply", "Subtract"]
    },
    **{name: row(ROWS, call=_with_another) for name in ["Maximum", "Minimum"]},
    "Dot": row(ROWS, 2, call=_with_another),
    "Attention": row(ROWS, call=_with_another),
    "AdditiveAttention": row(ROWS, call=_with_another),
    "MultiHeadAttention": row(
        ROWS, 2, 3, call=lambda layer, x, other, _: layer(x, other)
    ),
    "GroupQueryAttention": row(
        ROWS, 4, 2, 1, call=lambda layer, x, other, _: layer(x, other)
    ),
}
_CONVOLUTIONS = {
    **by_rank("Conv", 2, 3, padding="same"),
    **{
        f"Conv{rank}Transpose": row(shape, 2, 3, strides=2)
        for rank, shape in _BY_RANK.items()
    },
    **by_rank("SeparableConv", 2, 3, ranks="12"),
    **by_rank("DepthwiseConv", 3, ranks="12"),
    **by_rank("UpSampling"),
    **by_rank("ZeroPadding"),
    **by_rank("Cropping", 1),
}
_POOLING = {
    **by_rank("AveragePooling", 2),
    **by_rank("MaxPooling", 2),
    **by_rank("GlobalAveragePooling"),
    **by_rank("GlobalMaxPooling"),
    **by_rank("AdaptiveAveragePooling", 2),
    **by_rank("AdaptiveMaxPooling", 2),
}
_RECURRENT = {
    **{name: row(ROWS, 3) for name in ["SimpleRNN", "GRU", "LSTM"]},
    **{
        name: row(ROWS, 3, call=_as_cell)
        for name in ["SimpleRNNCell", "GRUCell", "LSTMCell"]
    },
    "StackedRNNCells": row(ROWS, lambda layers: [_cell(layers)] * 1, call=_as_cell),
    "RNN": row(ROWS, _cell),
    "Bidirectional": row(ROWS, _recurrent),
    "ConvLSTM1D": row((3, 4, 2), 2, 3),
    "ConvLSTM2D": row((3, 4, 4, 2), 2, 3),
    "ConvLSTM3D": row((2, 3, 3, 3, 2), 2, 3),
}
_FEATURES = {
    "CategoryEncoding": row(FLAT, 8, dtype="int32", is_first=True),
    "Discretization": row(FLAT, [0.2, 0.5], is_first=True, call=_then_embedded),
    "Hashing": row(FLAT, 8, dtype="string", is_first=True, call=_then_embedded),
    "HashedCrossing": row(
        (1,),
        8,
        dtype="string",
        is_first=True,
        call=lambda layer, x, _, layers: layers.Embedding(8, 3)(layer((x, x))),
    ),
    "IntegerLookup": row(
        FLAT,
        vocabulary=[1, 2, 3],
        dtype="int64",
        is_first=True,
        call=_then_embedded,
    ),
    "StringLookup": row(
        FLAT,
        vocabulary=["a", "b", "c"],
        dtype="string",
        is_first=True,
        call=_then_embedded,
    ),
    "TextVectorization": row(
        (1,),
        vocabulary=["a", "b", "c"],
        output_sequence_length=2,
        dtype="string",
        is_first=True,
        call=_then_embedded,
    ),
    "MelSpectrogram": row(
        (64,), 16, 8, num_mel_bins=4, sampling_rate=64, is_first=True
    ),
    "STFTSpectrogram": row((64, 1), frame_length=16, frame_step=8, is_first=True),
    "RandomFourierFeatures": row(FLAT, 8),
}
_IMAGES = {
    **images("CenterCrop RandomCrop Resizing", 4, 4),
    **images("RandomFlip RandomInvert RandomGrayscale RandomErasing"),
    **images("AugMix AutoContrast CutMix MixUp RandAugment Solarization"),
    **images("Equalization", is_first=True),
    **images("RandomRotation RandomZoom RandomBrightness", 0.2),
    **images("RandomHeight RandomWidth", 0.2, call=_then_averaged),
    **images("RandomTranslation", 0.2, 0.2),
    **images("RandomShear RandomPerspective", 0.2),
    **images("RandomContrast RandomSaturation RandomHue", 0.2, is_first=True),
    **images("RandomColorJitter RandomElasticTransform RandomGaussianBlur"),
    **images("RandomColorDegeneration RandomSharpness", 0.5),
    **images("RandomPosterization", 4, is_first=True),
    **images("ContrastLimitedAdaptiveHistogramEqualization", is_first=True),
}
#: Name -> how it is trained.
LAYERS = {
    **_CORE,
    **_ACTIVATIONS,
    **_NORMALIZATIONS,
    **_MERGING,
    **_CONVOLUTIONS,
    **_POOLING,
    **_RECURRENT,
    **_FEATURES,
    **_IMAGES,
}
#: What draws in Python while it is traced: each graph has another of them.
DRAWN_IN_PYTHON = {"AugMix", "RandAugment"}
#: What the newest Keras 2 cannot train, whatever the optimizer.
FAIL_IN_KERAS_2 = {"SpectralNormalization": "its own check takes no InputSpec"}
#: Name -> why no network is trained with it.
NOT_TRAINED = {
    "Layer": "the base class",
    "Wrapper": "a base class",
    "AbstractRNNCell": "a base class",
    "PreprocessingLayer": "a base class",
    "InputLayer": "each network has one",
    "DenseFeatures": "feature columns are gone from TensorFlow's own pages",
    "FlaxLayer": "runs on JAX",
    "JaxLayer": "runs on JAX",
    "TorchModuleWrapper": "runs on PyTorch",
    "TFSMLayer": "a saved model: a function, as zoos of expressions have them",
    "MaxNumBoundingBoxes": "takes and returns boxes, not a batch of numbers",
    "DynamicLookup": "learns words, not weights",
    "CategoryCrossing": "returns strings or sparse strings, before TensorFlow 2.6",
}
