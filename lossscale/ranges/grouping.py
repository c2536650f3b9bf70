"""Which block of a model a variable or a layer belongs to."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List

from lossscale.runtime.kerases import layers_of


def blocks_of(model: Any, names: List[str], sources: List[Any]) -> List[str]:
    """Returns the name of the block of each source, its own name if it is in none.

    A block is a layer of the model. One with a `ScaledBlock` in it counts as the layers
    that it is made of.

    Args:
      model: The model.
      names: Of each source.
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
    # What a ScaledBlock says of itself: the rooms know nothing of each other.
    return getattr(layer, "has_own_scale", False) is True
