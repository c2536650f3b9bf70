"""A stand-in for `horovod.tensorflow.keras`."""

from __future__ import annotations

from horovod.tensorflow import allreduce, init

__all__ = ["DistributedOptimizer", "init"]


def DistributedOptimizer(optimizer):  # noqa: N802 - Horovod's name
    """Returns the optimizer as one that adds up where it computes gradients.

    As Horovod's: a class that is made here, of the optimizer's own, from its config.
    """
    base = type(optimizer)

    def adding_up(name):
        def compute(self, *args, **kwargs):
            pairs = getattr(base, name)(self, *args, **kwargs)
            return [(allreduce(grad), variable) for grad, variable in pairs]

        return compute

    # Legacy optimizers have the first, new ones the second.
    names = ["_compute_gradients", "compute_gradients"]
    methods = {name: adding_up(name) for name in names if hasattr(base, name)}
    return type(base.__name__, (base,), methods).from_config(optimizer.get_config())
