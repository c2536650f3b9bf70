"""The part of the wrapper that sums gradients in the inner optimizer's place."""

from __future__ import annotations

from typing import Any, Optional

from lossscale.optimizer.inner_sum import InnerSum, own_way_to_sum
from lossscale.optimizer.step import communication
from lossscale.runtime import replicas
from lossscale.scales.base import LossScale


class Communicating:
    """Knows in which dtype replicas exchange their gradients."""

    #: The optimizer that is wrapped.
    inner_optimizer: Any
    #: The base class of the optimizers of this Keras.
    _optimizer_class: type
    #: The method in which these sum gradients over the replicas.
    _summing_method: str
    _communication_dtype: Optional[str]
    _inner_sum: InnerSum

    @property
    def communication_dtype(self) -> Optional[str]:
        """The dtype in which replicas exchange gradients. None: the gradients' own."""
        return self._communication_dtype

    def _communicate_in(self, dtype: Any, inner_optimizer: Any) -> None:
        """Sets `communication_dtype`. Raises if the inner optimizer rules it out."""
        found = communication.checked_dtype(dtype)
        self._refuse_to_sum(found, inner_optimizer)
        # Keras's own __setattr__ works only after Keras's constructor has run.
        object.__setattr__(self, "_communication_dtype", found)

    def _leave_out_inner_sum(self, loss_scale: LossScale) -> None:
        """Keeps the inner optimizer from summing gradients that the wrapper sums.

        Raises:
          ValueError: The loss scale checks no gradients, and their sum may overflow.
        """
        dtype, inner = self._communication_dtype, self.inner_optimizer
        communication.refuse_unchecked(dtype, loss_scale)
        inner_sum = InnerSum(inner, self._summing_method, dtype is not None)
        object.__setattr__(self, "_inner_sum", inner_sum)

    def _dtype_to_sum_in(self) -> Optional[str]:
        """Returns the dtype in which the wrapper sums. None: it does not sum."""
        # The inner optimizer may have been changed since the wrapper was made.
        self._refuse_to_sum(self._communication_dtype, self.inner_optimizer)
        return self._communication_dtype if replicas.count() > 1 else None

    def _refuse_to_sum(self, dtype: Optional[str], inner_optimizer: Any) -> None:
        if dtype is not None:
            way = self._own_way_to_sum(inner_optimizer)
            communication.refuse_impossible(dtype, inner_optimizer, way)

    @classmethod
    def _own_way_to_sum(cls, inner_optimizer: Any) -> Optional[str]:
        """Says how an optimizer sums gradients itself. None: the wrapper can do it."""
        return own_way_to_sum(
            inner_optimizer, cls._optimizer_class, cls._summing_method
        )
