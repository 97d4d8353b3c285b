"""The shape of a model's keys and values, and the types they can be stored in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ElementType:
    """How one element of a key or value is stored.

    Attributes
    ----------
    name : str
        Name of the type.
    size : int
        Bytes of an element.
    scale_size : int
        Bytes of scale kept beside each vector, that is for each token, KV head, and key or value.
    scales : str
        Which scales there are, in words; empty for none.
    """

    name: str
    size: int
    scale_size: int = 0
    scales: str = ""


#: The types that keys and values can be stored in, by name; the usual one first.
ELEMENT_TYPES = {
    kind.name: kind
    for kind in (
        ElementType("bfloat16", 2),
        ElementType("float16", 2),
        ElementType("float32", 4),
        ElementType("int8", 1, 4, "a float32 scale per token and head, counted"),
        ElementType("fp8", 1, 0, "a scale per head, the same for all tokens, not counted"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose keys and values have one shape and one reach; one `paged_kv.KvCache` holds them.

    Attributes
    ----------
    num_layers : int
        Layers of the group.
    num_kv_heads : int
        Key/value heads of a layer; 1 for a latent that all heads read.
    head_dim : int
        Elements of a key of one head.
    v_head_dim : int
        Elements of a value of one head; 0 where values are read out of the key (MLA).
    window : int, optional
        Tokens that a query sees, itself included; None for all before it.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no layer has."""
        least = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "v_head_dim": 0}
        if self.window is not None:
            least["window"] = 1
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {bound}")

    def bytes_per_token(self, dtype: ElementType) -> int:
        """Count the bytes that one token takes in all layers of the group, scales included."""
        vectors = 2 if self.v_head_dim else 1
        head = (self.head_dim + self.v_head_dim) * dtype.size + vectors * dtype.scale_size
        return self.num_layers * self.num_kv_heads * head


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """All layers of a model that keep keys and values.

    Attributes
    ----------
    name : str
        What to call the model.
    groups : tuple of LayerGroup
        Layers of one kind each, in the order in which they first appear.
    context_length : int, optional
        Longest sequence of the model.
    notes : tuple of str
        What the figures leave out.
    """

    name: str
    groups: tuple[LayerGroup, ...]
    context_length: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values."""
        return sum(group.num_layers for group in self.groups)

    def bytes_per_token(self, dtype: ElementType) -> int:
        """Count the bytes of a token in all layers, as long as every window still holds it."""
        return sum(group.bytes_per_token(dtype) for group in self.groups)

    def bytes_per_token_beyond(self, dtype: ElementType) -> int:
        """Count the bytes by which a sequence longer than every window grows with each token."""
        return sum(group.bytes_per_token(dtype) for group in self.groups if group.window is None)
