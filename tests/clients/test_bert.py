"""A small BERT of KerasHub, on Keras 3, and the last of transformers for TensorFlow."""

import os

import numpy as np
import pytest
from clients import TOO_LARGE, keras2, wrapped
from models import differ, policy_of

pytestmark = pytest.mark.slow
STEPS, BATCH = 40, 4


def tokens(dtype):
    """Returns the numbers of 8 tokens for each row of a `fit`."""
    return np.random.default_rng(1).integers(0, 32, [STEPS * BATCH, 8], dtype)


def assert_trains_with_fit(keras, model, inputs, ids):
    """Asserts that a built classifier learns what the first of `ids` are."""
    optimizer = wrapped(keras.optimizers.Adam(1e-3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    before = model.get_weights()
    model.fit(inputs, ids[:, 0] % 2, batch_size=BATCH, verbose=0)
    skipped = int(optimizer.loss_scale.skipped_steps.numpy())
    assert 0 < skipped < STEPS
    assert int(optimizer.iterations.numpy()) == STEPS - skipped
    assert float(optimizer.loss_scale.numpy()) == TOO_LARGE / 2**skipped
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert differ(before, model.get_weights())


def test_kerashubs_trains_with_fit():
    keras, hub = map(pytest.importorskip, ("keras", "keras_hub"))
    backbone = hub.models.BertBackbone(
        vocabulary_size=32,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=16,
        max_sequence_length=8,
        dtype="mixed_float16",
    )
    model = hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=None)
    ids = tokens(np.int64)
    inputs = {"token_ids": ids, "segment_ids": ids * 0, "padding_mask": ids * 0 + 1}
    assert_trains_with_fit(keras, model, inputs, ids)


def test_that_of_transformers_trains_with_fit():
    os.environ.setdefault("USE_TORCH", "0")
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "TFBertForSequenceClassification"):
        pytest.skip("transformers 5 has no models for TensorFlow")
    keras = keras2()
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    ids = tokens(np.int32)
    inputs = {"input_ids": ids, "attention_mask": ids * 0 + 1}
    with policy_of(keras, "mixed_float16"):
        model = transformers.TFBertForSequenceClassification(config)
        model(inputs)
        assert_trains_with_fit(keras, model, inputs, ids)
