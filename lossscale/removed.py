"""What 3.0 removed, and what to write instead: one table, and who asks for its rows."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from typing import Any, Dict, NoReturn

from lossscale.runtime import registry

#: What to write instead of each name that 2.1 was the last release to have.
REMOVED: Dict[str, str] = {
    "ScaledBlock": "Use HeadroomLossScale, or let the layers whose gradients are far "
    'below the others compute in float32: layer(..., dtype="float32").',
    "LogNormalLossScale": "Use HeadroomLossScale. The page 'A loss scale of your own' "
    "links to this rule: examples/log_normal.py.",
    "import_state": "Pass what the other system saved as arguments, as in "
    'DynamicLossScale.from_preset("torch", initial_loss_scale=scaler.get_scale()).',
    "export_state": "Read the loss scale's variables, such as "
    "loss_scale.current_loss_scale.numpy().",
    "Run": "Keep the arrays, and pass them to simulate.",
    "save_run": "numpy.savez writes arrays, and Keras's CSVLogger the monitor's logs.",
    "load_run": "numpy.load reads the arrays of such a file: pass them to simulate.",
    "LossScaleMonitor.record": "CSVLogger writes the monitor's logs, after each epoch.",
    "LossScaleMonitor.check_activations": "A skipped step changes nothing, so the "
    'weights that failed are still there: write on_stall="raise", then call '
    "find_nonfinite(model, x, y) with the batch that the monitor has named.",
    "GradientRanges.blocks": "A row's name begins with that of its layer.",
    "GradientRanges.by_block": "Read the rows, one for each variable.",
    "GradientRanges.need_own_scale": "Where no single scale serves all layers, the "
    "printed report says so.",
    "python -m lossscale simulate": "Call lossscale.simulate.",
    "python -m lossscale plot": "Call the method `plot` of what lossscale.simulate "
    "returns.",
}
#: The modules that went, and the name of the table whose row answers for each.
_MODULES = {
    "lossscale.blocks": "ScaledBlock",
    "lossscale.scales.interchange": "import_state",
    "lossscale.scales.log_normal": "LogNormalLossScale",
    "lossscale.simulation.run_file": "Run",
    "lossscale.monitor.activations": "LossScaleMonitor.check_activations",
}


def sentence(name: str, unknown: str = "") -> str:
    """Returns what an error says of a removed name, `unknown` if it never was."""
    if name not in REMOVED:
        return unknown
    return f"`{name}` was removed in lossscale 3.0. {REMOVED[name]}"


class _Finder(importlib.abc.MetaPathFinder):
    """Answers `from lossscale import ScaledBlock`, and imports of modules that went.

    Python asks the finders for a name that a package lacks, and drops the message of
    the AttributeError.
    """

    def find_spec(self, fullname: str, *_: Any) -> None:
        # `importlib.util.find_spec` asks, too: it wants no error for what is not there.
        # Only an import has the import system as both callers. If a later Python has
        # other ones there, the error of an import lacks the sentence, and no more.
        callers = sys._getframe(1), sys._getframe(1).f_back
        if any(
            caller is None or caller.f_globals is not vars(importlib._bootstrap)
            for caller in callers
        ):
            return
        name = _MODULES.get(fullname, fullname.replace("lossscale.", "", 1))
        if name in REMOVED and fullname.startswith("lossscale."):
            raise ImportError(sentence(name), name=fullname)


def _stand_in(name: str) -> type:
    """Returns a class in a removed one's place, for files that name it."""

    def from_config(*_: Any, **__: Any) -> NoReturn:  # each Keras has its own arguments
        raise ValueError(sentence(name))

    members = {"from_config": classmethod(from_config), "get_config": lambda _: {}}
    return type(name, (), members)


if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
    sys.meta_path.append(_Finder())
for _name in ("ScaledBlock", "LogNormalLossScale"):
    registry.serializable(_stand_in(_name))
