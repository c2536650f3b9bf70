"""What is to be done as soon as somebody imports a package."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any, Callable, Dict, List


class _Watch(importlib.abc.MetaPathFinder):
    """Finds one package as the other finders do, and sees when it is imported."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls: List[Callable[[Any], None]] = []

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        others = [each for each in sys.meta_path if each is not self]
        # An old finder has no such method, as that of `six` once (seen on 1.15).
        finders = [getattr(each, "find_spec", None) for each in others]
        specs = (find(fullname, path, target) for find in finders if find)
        spec: Any = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    del _watches[self._name]
                    for call in self.calls:
                        call(module)

            spec.loader.exec_module = exec_module  # this object loads nothing else
        return spec


#: Who waits for which package.
_watches: Dict[str, _Watch] = {}


def when_imported(name: str, call: Callable[[Any], None]) -> None:
    """Calls `call` with a package when it is imported, at once if it has been.

    Nothing is imported for it. If the import fails, the next one is waited for.

    Args:
      name: The package's name.
      call: Called once, at the end of the import, with the module. In order.
    """
    if name in sys.modules:
        call(sys.modules[name])
        return
    if name not in _watches:
        _watches[name] = _Watch(name)
        sys.meta_path.insert(0, _watches[name])
    _watches[name].calls.append(call)
