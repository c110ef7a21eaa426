"""An implementation of transformers' attention interface that computes a module's attention over its layout.

Modules without a layout use transformers' implementation ``sdpa``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from partita.activation.caches import end_packing_warning
from partita.attention.intercept import Interception, current
from partita.attention.segments import documents_by_position
from partita.errors import ConfigError
from partita.parallel.sequence.attention import current_slices, register_in_transformers
from partita.parallel.sequence.exchange import gather
from partita.parallel.sequence.slices import Slices

IMPLEMENTATION = "partita"
# Arguments of the interface that change the scores.
_OTHERS = ("softcap", "s_aux", "position_bias", "cache")
_OWN_RULE = "adds a rule of its own to the mask"


class MaskArguments:
    """Replacement for a dense mask that stores the arguments of the mask: padding, the queries' offset, a window, and
    the rule for a query and a key, which separates packed documents.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._dense: list[Tensor | None] = []
        self._documents: list[tuple[Tensor, Tensor | None]] = []
        padding = given.get("attention_mask")
        start, length = int(given.get("kv_offset", 0)), int(given["kv_length"])
        self._seen: Tensor | None = None
        self._paddings: dict[int, Tensor | None] = {}
        self._documents_by_rule: dict[int, Tensor | None] = {}
        if padding is not None:
            padding = padding[:, start : start + length].bool()
            if padding.shape[1] == length and not bool(padding.all()):
                self._seen = padding
        self.offset = int(given.get("q_offset", 0)) - start
        self.window: int | None = given.get("local_size")
        function = given.get("mask_function")
        self.is_special = bool(given.get("use_vmap")) or getattr(function, "__qualname__", "").startswith("or_masks")

    def dense(self, num_queries: int, num_keys: int) -> Tensor | None:
        """Return the dense mask for ``scaled_dot_product_attention``, cut to the given numbers of queries and keys."""
        if not self._dense:
            self._dense.append(sdpa_mask(**self._given))
        found = self._dense[0]
        return None if found is None else found[..., :num_queries, :num_keys]

    def padding(self, num_keys: int) -> Tensor | None:
        """Return a bool tensor [samples, keys], False for padding; None without padding. All layers share the
        tensor.
        """
        if num_keys not in self._paddings:
            self._paddings[num_keys] = None if self._seen is None else self._seen[:, :num_keys]
        return self._paddings[num_keys]

    def documents(self, positions: Tensor, num_samples: int, length: int, slices: Slices | None) -> Tensor | None:
        """Return the documents [samples, length] of ``positions`` [samples or 1, length]; None: one per sample.

        Slices of the positions are gathered from the ranks. The result is computed once for all layers.
        """
        for known, found in self._documents:
            if known is positions:
                return found
        is_cut = slices is not None and positions.shape[1] == slices.num_own != length
        whole = gather(positions, 1, slices) if slices is not None and is_cut else positions
        if whole.shape[1] != length:
            return None
        found = documents_by_position(whole)
        found = None if found is None else found.expand(num_samples, length)
        self._documents.append((positions, found))
        return found

    def documents_by_rule(self, num_samples: int, length: int) -> Tensor | None:
        """Return the documents [samples, length] that the mask's rule separates; None: one per sample.

        A document begins where a query does not see the previous key. The result is computed once for all layers.
        """
        if length not in self._documents_by_rule:
            self._documents_by_rule[length] = self._find_documents(num_samples, length)
        return self._documents_by_rule[length]

    def _find_documents(self, num_samples: int, length: int) -> Tensor | None:
        rule = self._given.get("mask_function")
        if rule in (None, causal_mask_function, bidirectional_mask_function) or self.offset:
            return None
        at = torch.arange(1, length, device=self._given.get("device"))[None] + int(self._given.get("kv_offset", 0))
        sample = torch.arange(num_samples, device=at.device)[:, None]
        sees_previous = rule(sample, torch.zeros_like(sample), at, at - 1).expand(num_samples, length - 1)
        if sees_previous.is_meta:
            return None
        begins = torch.zeros(num_samples, length, dtype=torch.long, device=at.device)
        begins[:, 1:] = ~sees_previous
        if (seen := self.padding(length)) is not None:
            begins[:, 1:] *= seen[:, 1:] & seen[:, :-1]
        return begins.cumsum(1) if bool(begins.any()) else None


def mask(**given: Any) -> MaskArguments:
    """Create a :class:`MaskArguments`; transformers calls this function to create a mask."""
    return MaskArguments(given)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention; transformers calls this function from its attention modules.

    The tensors are [samples, heads, positions, width]; the result is [samples, positions, heads, width].
    """
    interception, slices, positions = current(), current_slices(), options.get("position_ids")
    end_packing_warning(is_separated=interception is not None and positions is not None)
    num_queries, num_keys = (x.shape[2] if slices is None else slices.length for x in (query, key))
    if interception is None:
        dense = (
            attention_mask.dense(num_queries, num_keys) if isinstance(attention_mask, MaskArguments) else attention_mask
        )
        sdpa = AttentionInterface()[register_in_transformers("sdpa")]
        done: tuple[Tensor, None] = sdpa(module, query, key, value, dense, dropout=dropout, scaling=scaling, **options)
        return done
    for name in _OTHERS:
        if options.get(name) is not None:
            raise interception.unsupported(f"has '{name}'")
    is_causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    seen, documents = None, None
    if isinstance(attention_mask, MaskArguments):
        _check(attention_mask, interception, causal)
        if causal:  # a cache of constant size has unused keys after the last query
            num_keys = min(num_keys, attention_mask.offset + num_queries)
            key, value = (x[:, :, :num_keys] for x in (key, value))
        seen = attention_mask.padding(num_keys)
        if num_queries == num_keys:
            documents = _documents(attention_mask, interception, positions, query.shape[0], num_keys)
    elif attention_mask is not None:
        raise interception.unsupported("is given a mask of the caller's own")
    given = {"seen": seen, "documents": documents, "dropout": dropout, "scale": scaling}
    out = interception.compute(query, key, value, causal, **given)
    return out.transpose(1, 2).contiguous(), None


def _documents(
    given: MaskArguments, interception: Interception, positions: Tensor | None, num_samples: int, length: int
) -> Tensor | None:
    """Return the packed documents by positions, or else by the mask's rule."""
    if positions is not None and positions.ndim == 2:
        return given.documents(positions, num_samples, length, current_slices())
    try:
        return given.documents_by_rule(num_samples, length)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise interception.unsupported(_OWN_RULE) from error


def _check(given: MaskArguments, interception: Interception, causal: bool) -> None:
    if given.is_special:
        raise interception.unsupported(_OWN_RULE)
    layout = interception.layout(causal)
    if given.window is not None and (layout.pattern != "sliding" or max(layout.windows) > given.window):
        raise interception.unsupported(f"has a window of its own, of {given.window} positions")


def top_level_models(model: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    """Return the outermost transformers models in a model, with their names."""
    found: list[tuple[str, PreTrainedModel]] = []
    for name, module in model.named_modules():
        inside = any(not parent or name.startswith(f"{parent}.") for parent, _ in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found.append((name, module))
    return found


def check_settable(model: nn.Module) -> None:
    """Check that all transformers models in a model support a choice of the attention implementation.

    Raises:
        ConfigError: a model does not.
    """
    for name, each in top_level_models(model):
        if not each._can_set_attn_implementation():
            raise ConfigError(
                f"attention.pattern: {type(each).__name__}{f' ({name})' if name else ''} does not go through "
                "transformers' attention interface, so its attention cannot be intercepted; set attention.pattern to "
                "dense"
            )


def install(model: nn.Module) -> Callable[[], None]:
    """Make transformers models call :func:`attention`; return a function that restores their implementations."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, mask)
    before = [(each, each.config._attn_implementation) for _, each in top_level_models(model)]

    def restore() -> None:
        for each, implementation in before:
            each.set_attn_implementation(implementation)

    try:
        for each, _ in before:
            each.set_attn_implementation(IMPLEMENTATION)
    except BaseException:
        restore()
        raise
    return restore
