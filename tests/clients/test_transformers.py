"""Models of transformers, the last version that has them for TensorFlow."""

from __future__ import annotations

import os

import numpy as np
import pytest
from clients import assert_trained, keras2, wrapped

STEPS = 40

pytestmark = pytest.mark.slow


def test_a_small_bert_trains_with_fit():
    os.environ.setdefault("USE_TORCH", "0")
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "TFBertForSequenceClassification"):
        pytest.skip("transformers 5 has no models for TensorFlow")
    keras = keras2()
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        config = transformers.BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
        )
        model = transformers.TFBertForSequenceClassification(config)
        optimizer = wrapped(keras.optimizers.Adam(1e-3))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss)
        rng = np.random.default_rng(1)
        ids = rng.integers(0, 32, [STEPS * 4, 8], np.int32)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        model(inputs)
        before = model.get_weights()
        model.fit(inputs, ids[:, 0] % 2, batch_size=4, verbose=0)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert model.optimizer is optimizer
    assert_trained(optimizer, before, model.get_weights(), STEPS)
