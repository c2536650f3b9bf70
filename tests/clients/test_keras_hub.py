"""Models of KerasHub, on Keras 3."""

from __future__ import annotations

import numpy as np
import pytest
from clients import assert_trains_with_fit, keras3, tokens

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
    ids = tokens(np.int64)
    inputs = {
        "token_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "padding_mask": np.ones_like(ids),
    }
    assert_trains_with_fit(keras, model, inputs, ids)
