"""Block-sparse attention: layouts, the function over them, and its place in a model."""

from partita.attention.functional import block_sparse
from partita.attention.layout import Layout

__all__ = ["Layout", "block_sparse"]
