"""Calls functions as soon as somebody imports a package."""

from __future__ import annotations

import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence


class _Watch(importlib.abc.MetaPathFinder):
    """Finds one package as the other finders do, and notices its import."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls: List[Callable[[ModuleType], None]] = []

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[ModuleType] = None,
    ) -> Optional[ModuleSpec]:
        if fullname != self._name:
            return None
        others = [each for each in sys.meta_path if each is not self]
        # An old finder may lack the method; that of `six` 1.15 does.
        finders = [getattr(each, "find_spec", None) for each in others]
        specs = (find(fullname, path, target) for find in finders if find)
        spec: Optional[ModuleSpec] = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader  # this object loads nothing else
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    del _watches[self._name]
                    for call in self.calls:
                        call(module)

            loader.exec_module = exec_module
        return spec


#: The package that each one waits for, by its name.
_watches: Dict[str, _Watch] = {}


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Calls a function when a package is imported; at once if it has been.

    This imports nothing. If an import fails, the function waits for the next one.

    Args:
      name: The package's name.
      call: Takes the module. It is called once, at the end of the import; several
        functions are called in the order in which they were given here.
    """
    if name in sys.modules:
        call(sys.modules[name])
        return
    if name not in _watches:
        _watches[name] = _Watch(name)
        sys.meta_path.insert(0, _watches[name])
    _watches[name].calls.append(call)
