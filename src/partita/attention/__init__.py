"""Block-sparse attention: layouts, the attention function, and its application to a model."""

from partita.attention.functional import block_sparse
from partita.attention.layout import Layout

__all__ = ["Layout", "block_sparse"]
