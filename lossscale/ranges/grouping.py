"""Which block of a model a variable or a layer belongs to."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List

from lossscale.runtime.kerases import layers_of


def blocks_of(model: Any, names: List[str], sources: List[Any]) -> List[str]:
    """Returns the name of each source's block, or its own name if it is in no block.

    A block is a layer of the model. If a layer contains a `ScaledBlock`, the layers
    that it is made of are the blocks.

    Args:
      model: The model.
      names: The names of the sources.
      sources: Variables and layers.
    """
    found: Dict[int, str] = {}
    used: Dict[str, int] = {}
    for block in _blocks(model):
        used[block.name] = used.get(block.name, 0) + 1
        number = used[block.name]
        name = block.name if number == 1 else f"{block.name} ({number})"
        for part in (*block.variables, *layers_of(block)):
            found.setdefault(id(part), name)
    return [found.get(id(source), name) for name, source in zip(names, sources)]


def _blocks(model: Any) -> Iterator[Any]:
    for layer in getattr(model, "layers", ()):
        if _is_scaled(layer) or not any(map(_is_scaled, layers_of(layer))):
            yield layer
        else:
            yield from _blocks(layer)


def _is_scaled(layer: Any) -> bool:
    # A ScaledBlock has this attribute. `ranges` and `blocks` do not import each other.
    return getattr(layer, "has_own_scale", False) is True
