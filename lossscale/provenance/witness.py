"""Witness: sees what becomes of one loss scale S, for all optimizers that share it."""

from __future__ import annotations

import weakref
from typing import Any, Dict, Iterable, List, Optional

import tensorflow as tf

from lossscale.gradients.check import Check, dense_part, is_small
from lossscale.provenance.kinds import SCALE, SCALED, UNKNOWN, UNSCALED, Kind
from lossscale.provenance.mistakes import Mistakes, Reads
from lossscale.provenance.origins import (
    BEFORE,
    LOSS,
    Before,
    Loss,
    Origins,
    Unscaled,
    scales_of,
)
from lossscale.provenance.walk import Kinds, notes_of
from lossscale.runtime import graphs, keras_versions, replicas
from lossscale.runtime.aliases import Divisors, Grad, Grads, Scalar, Variable
from lossscale.scales.base import LossScale
from lossscale.scales.uses import Product, unguarded

__all__ = ["Origins", "Witness"]


class Witness:
    """Notes each use of a loss scale S, and says where gradients come from.

    It changes no state, and adds no operation. An optimizer, "owner", may be anything.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale
        #: What S is read from. A `FixedLossScale` has no variable.
        variable = getattr(unguarded(loss_scale), "current_loss_scale", None)
        self.has_variable = variable is not None
        self._kinds, self._reads = Kinds(variable), Reads()
        self._kinds.on_operation = self._reads.note_operation
        #: What is seen of the program of each optimizer.
        self._programs: weakref.WeakKeyDictionary[Any, Mistakes]
        self._programs = weakref.WeakKeyDictionary()
        #: Whether a loss was scaled since gradients were unscaled. Where an optimizer
        #: has a state, that knows it better.
        self.is_scaled = False
        #: Each replica's `last_scale` of eager mode.
        self._in_eager: Dict[object, Scalar] = {}

    # What it notes.

    def note_optimizer(self, owner: Any, is_silent: bool) -> None:
        """Another optimizer shares S. It gets no warning if it `is_silent`."""
        self._programs[owner] = Mistakes(self._loss_scale, self._reads, is_silent)

    def note_kind(self, owner: Any, kind: str) -> None:
        """Warnings call this optimizer by the class `kind`."""
        self._programs[owner].kind = kind

    def note_replaced(self, other: Any, witness: Witness, owner: Any) -> None:
        """`owner` takes the place of an `other` optimizer, whose witness is given."""
        old, new = witness._programs.pop(other), self._programs[owner]
        new.waits, new.has_own = old.waits, old.has_own

    def note_weights(self, variables: Iterable[Variable]) -> None:
        """These variables hold no S. What was noted first of a variable stays."""
        self._kinds.note_variables(map(keras_versions.tensor_of, variables))

    def note_state(self, variables: Iterable[Variable]) -> None:
        """These hold S: what reads or writes them may scale or unscale."""
        self._kinds.note_variables(variables, Kind(SCALE))

    def note_layer_state(self, variable: Variable, is_scaled: bool) -> None:
        """A layer keeps this for its gradients. S is in it if it `is_scaled`."""
        kind = Kind(SCALED if is_scaled else UNKNOWN)
        self._kinds.note_variables([keras_versions.tensor_of(variable)], kind)

    def note_read(self, tensor: Scalar) -> None:
        """S was read as a tensor."""
        self._kinds.note(tensor, Kind(SCALE, (tensor,)))
        if not hasattr(tensor, LOSS):
            self._reads.read()

    def note_float(self) -> None:
        """S was read as a Python number. No graph shows where that goes."""
        self._reads.read_as_number()

    def note_loss(self, product: Product, owner: Any) -> None:
        """An optimizer multiplied a loss by S. None: `LossScale.scale` did."""
        whose = weakref.ref(owner) if owner is not None else lambda: None
        scales = [product.loss_scale]
        if product.factor is not None:
            self._kinds.note_product(product)
        else:  # it was multiplied by what its kind tells
            products = filter(tf.is_tensor, tf.nest.flatten(product.product))
            kinds = self._kinds.of(products)
            scales = [s for kind in kinds if kind is not None for s in scales_of(kind)]
        for scale in scales:
            setattr(scale, LOSS, Loss(product.loss, whose))
        self.is_scaled = True
        self._reads.loss_scaled()
        for other, program in list(self._programs.items()):
            is_own = other is owner
            if is_own or not program.waits:
                program.owner_known(is_own)
            program.waits = program.waits or is_own

    def note_last_scale(self, loss_scale: Scalar) -> None:
        """S multiplied a loss, and an optimizer has no state that holds it."""
        self._last_scales(graphs.current_graph())[replicas.this_one()] = loss_scale

    def note_unscaled(
        self,
        owners: List[Any],
        origins: Origins,
        scaled: Grads,
        divisors: Divisors,
        unscaled: Grads,
        check: Check,
    ) -> None:
        """The first of `owners` unscaled a list of these `origins`, for all of them."""
        if any(divisor is not None for divisor in divisors):
            for other, program in list(self._programs.items()):
                if other in owners:
                    program.owner_known(is_own=True)
                    program.waits = True
                else:
                    program.unscaled_elsewhere()
        source = Unscaled(owners[0], check, len(unscaled), origins.losses)
        self._note_all_unscaled(unscaled, source)
        tensors = map(dense_part, unscaled)
        rows = zip(scaled, origins.kinds, divisors, tensors)
        for grad, kind, divisor, tensor in rows:
            if divisor is None:
                continue
            if kind.name == UNKNOWN:
                self._kinds.note(dense_part(grad), Kind(SCALED, (divisor,)))
            if graphs.is_building() or is_small(tensor):
                setattr(tensor, BEFORE, Before(grad, divisor))

    def note_unscaled_by(self, unscaled: Grads) -> None:
        """`LossScale.unscale` returned these. Their optimizer is not known."""
        self._note_all_unscaled(unscaled)
        waiting = [program for program in self._programs.values() if program.waits]
        if len(waiting) > 1:
            for program in waiting:
                program.unscaled_elsewhere(whose_is_unknown=True)

    def note_applied(
        self, owner: Any, origins: Origins, variables: List[Variable], is_divided: bool
    ) -> None:
        """An optimizer applies gradients to variables. Warns of likely mistakes.

        `is_divided` tells whether those of unknown kind are there, and are divided.
        """
        program = self._programs[owner]
        program.warn(origins.names, variables, is_divided)
        program.waits = False

    def _note_all_unscaled(self, unscaled: Grads, *sources: object) -> None:
        self.is_scaled = False
        self._reads.unscaled()
        for tensor in map(dense_part, unscaled):
            if tf.is_tensor(tensor):
                self._kinds.note(tensor, Kind(UNSCALED, sources))

    # What it is asked.

    def origins(self, grads: Grads) -> Origins:
        """Returns where gradients come from, as far as it can be seen."""
        return Origins(grads, self._kinds.of(grads))

    def owners(self, origins: Origins, owner: Any) -> List[Any]:
        """Returns whose gradients `owner` unscales: its own, and others' with them.

        Others' are those whose loss is known to be scaled, and that wait.
        """
        programs = list(self._programs.items())
        waiting = [other for other, p in programs if other is not owner and p.waits]
        return [owner, *(other for other in waiting if other in origins.owners)]

    @staticmethod
    def before(grad: Grad) -> Optional[Before]:
        """Returns what a gradient was before it was unscaled. None: not known.

        Eager mode keeps it of small gradients only.
        """
        before: Optional[Before] = getattr(dense_part(grad), BEFORE, None)
        return before

    def last_scale(self) -> Optional[Scalar]:
        """Returns the S of the last loss that is seen here: see `note_last_scale`."""
        replica = replicas.this_one()
        for graph in graphs.visible_graphs():
            scales = self._last_scales(graph)
            if replica in scales:
                last = scales[replica]
                return last if graphs.is_visible(last) else None
        return None

    def _last_scales(self, graph: Any) -> Dict[object, Scalar]:
        return self._in_eager if graph is None else notes_of(graph, self, dict)
