"""OnlyInSavedModels: variables that a SavedModel holds and no checkpoint."""

from __future__ import annotations

from typing import Any, Dict

import tensorflow as tf

from lossscale.runtime.aliases import Variable


class OnlyInSavedModels(tf.Module):
    """A module with variables that a SavedModel holds and no checkpoint.

    A SavedModel of a training step must hold each variable that the step uses.
    """

    def _kept(self) -> Dict[str, Variable]:
        """Returns these variables by name."""
        raise NotImplementedError

    # Not public: nothing else tells the two kinds of files apart. TensorFlow calls the
    # first method since 2.9, and called the second before (seen on 2.4 to 2.21).
    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> Dict[str, Variable]:
        children = dict(super()._trackable_children(save_type, **kwargs))
        return {**children, **self._kept()} if save_type == "savedmodel" else children

    def _list_extra_dependencies_for_serialization(
        self, cache: Any
    ) -> Dict[str, Variable]:
        listed = super()._list_extra_dependencies_for_serialization(cache)
        return {**listed, **self._kept()}
