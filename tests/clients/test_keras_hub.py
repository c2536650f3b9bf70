"""Models of KerasHub, on Keras 3."""

from __future__ import annotations

import numpy as np
import pytest
from clients import assert_trained, keras3, wrapped

STEPS = 40

pytestmark = pytest.mark.slow


def test_a_small_bert_trains_with_fit():
    keras = keras3()
    hub = pytest.importorskip("keras_hub")
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
    optimizer = wrapped(keras.optimizers.Adam(1e-3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 32, [STEPS * 4, 8])
    inputs = {
        "token_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "padding_mask": np.ones_like(ids),
    }
    before = model.get_weights()
    model.fit(inputs, ids[:, 0] % 2, batch_size=4, verbose=0)
    assert model.optimizer is optimizer
    assert_trained(optimizer, before, model.get_weights(), STEPS)
