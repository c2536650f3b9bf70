"""Models of transformers, the last version that has them for TensorFlow."""

from __future__ import annotations

import os

import numpy as np
import pytest
from clients import assert_trains_with_fit, keras2, tokens
from models import policy_of

pytestmark = pytest.mark.slow


def test_a_small_bert_trains_with_fit():
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
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    with policy_of(keras, "mixed_float16"):
        model = transformers.TFBertForSequenceClassification(config)
        model(inputs)
        assert_trains_with_fit(keras, model, inputs, ids)
