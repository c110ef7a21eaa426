"""Keys of values: partita's own, and the matching of any checkpoint's keys to parameters, whatever prefix they have.

A key is that of torch.distributed.checkpoint for a nested state dict: ``model.<parameter>``,
``optimizer.state.<parameter>.<state>``.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

from partita.checkpoint.backend import Stored
from partita.errors import PartitaError
from partita.inspection.modules import is_extra_state

MODEL, OPTIMIZER = "model.", "optimizer."
# Error-feedback residuals of compressed gradients, by parameter. No other library has this state.
ERROR_FEEDBACK = "partita.feedback."
# State of the outer optimizer (DiLoCo): its momentum, and error-feedback residuals of compressed outer gradients.
DILOCO = "partita.outer."
DILOCO_MOMENTUM, DILOCO_ERROR_FEEDBACK = DILOCO + "momentum.", DILOCO + "feedback."
# The dimensions of a parameter with 8-bit moments, in the order in which their blocks are cut.
BLOCK_ORDER = "partita.block_order."
# Key in the manifest: the prefixes of averages of the weights (EMA), whose names are those of the model.
AVERAGES = "averages"
STATE, GROUPS = OPTIMIZER + "state.", OPTIMIZER + "param_groups."
# Captures the prefix before the first component of a key in an optimizer's state dict.
_BEGINNING = re.compile(r"((?:[^.]+\.)*?)(?:state|param_groups)\.")
# The keys of get_optimizer_state_dict, nested or flattened: state.<parameter>.<state>.
_STATE = re.compile(r"state\.(.+)\.([^.]+)")
# The optimizer that is loaded if a checkpoint has several.
USUAL_OPTIMIZERS = (OPTIMIZER, "optim.")
MOST_NAMED = 5


def some_of(names: Iterable[str]) -> str:
    """Return the first few names as text, and the number of the others."""
    every = list(names)
    more = f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
    return ", ".join(every[:MOST_NAMED]) + more


def path_of(key: str) -> tuple[str | int, ...]:
    """Return the path of one of partita's own keys in the nested state dict."""
    if key.startswith(STATE):
        param, _, state = key.removeprefix(STATE).rpartition(".")
        return ("optimizer", "state", param, state)
    if key.startswith(GROUPS):
        number, _, setting = key.removeprefix(GROUPS).partition(".")
        return ("optimizer", "param_groups", int(number), setting)
    return ("model", key.removeprefix(MODEL)) if key.startswith(MODEL) else (key,)


def optimizer_prefixes(keys: Iterable[str]) -> list[str]:
    """Return the prefixes of the keys of optimizers.

    A model may have a module called ``state`` too. A prefix is an optimizer's only if nothing else is below it.
    """
    every = list(keys)
    found = {match[1] for key in every if (match := _BEGINNING.match(key))}
    return sorted(prefix for prefix in found if _is_optimizer(prefix, every))


def _is_optimizer(prefix: str, keys: list[str]) -> bool:
    inside = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    has_groups = any(rest.startswith("param_groups.") for rest in inside)
    *above, last, _ = ["", *prefix.split(".")]
    named = "model" not in (*above, last) and (has_groups or "optim" in last)
    return named and all(rest.startswith(("state.", "param_groups.")) for rest in inside)


def model_keys(stored: Stored, prefix: str | None = None) -> dict[str, str]:
    """Return the keys of a checkpoint's model by their names in it, when no engine provides the names.

    Args:
        prefix: the prefix of the keys of the model's copy; None: ``model``, or the only one there is.

    Raises:
        PartitaError: there is nothing below ``prefix``, or ``prefix`` is needed to choose between several copies.
    """
    keys = _without_optimizers(stored, stored.tensors)
    holders = {key: _holder(stored, key) for key in keys}
    copies = sorted(set(holders.values()))
    chosen = _choose(stored, copies, prefix)
    if chosen in stored.manifest.get(AVERAGES, ()):  # the rest is not averaged
        rest = {key.removeprefix(MODEL): key for key in keys if key.startswith(MODEL)}
        return rest | {key.removeprefix(chosen): key for key in keys if key.startswith(chosen)}
    direct = {key.removeprefix(chosen): key for key in keys if holders[key] == chosen}
    below = direct or {key.removeprefix(chosen): key for key in keys if key.startswith(chosen)}
    if not below:
        raise _nothing_there(stored, chosen, copies)
    return below


def _holder(stored: Stored, key: str) -> str:
    """Return the prefix of the state dict that contains a key."""
    path = (stored.paths.get(key) or path_of(key))[:-1]
    if "model" in path:
        path = path[: path.index("model") + 1]
    return "".join(f"{part}." for part in path)


def _without_optimizers(stored: Stored, keys: Iterable[str]) -> list[str]:
    prefixes = tuple(optimizer_prefixes(stored.keys))
    return [key for key in keys if not key.startswith((*prefixes, ERROR_FEEDBACK, DILOCO))]


def _choose(stored: Stored, copies: Sequence[str], prefix: str | None) -> str:
    """Return the key prefix of the selected copy of the model."""
    if prefix is not None:
        return f"{prefix.rstrip('.')}." if prefix else ""
    usual = [prefix for prefix in copies if f".{prefix}".endswith(f".{MODEL}")]
    if MODEL in copies or not copies:
        return MODEL
    if len(copies) > 1 and len(usual) != 1:
        raise PartitaError(
            f"checkpoint: '{stored.folder}' holds {len(copies)} copies of the weights, under "
            f"{some_of(map(_shown, copies))}: choose one by its prefix, engine.load(..., prefix={_shown(copies[0])}) "
            f"or partita checkpoint export --prefix {_shown(copies[0])}"
        )
    return (usual or copies)[0]


def _nothing_there(stored: Stored, prefix: str, copies: Sequence[str]) -> PartitaError:
    expected = f": expected {some_of(map(_shown, copies))}" if copies else ""
    return PartitaError(f"checkpoint: '{stored.folder}' has no weights of the model under {_shown(prefix)}{expected}")


def _shown(prefix: str) -> str:
    """Return a prefix in quotes, as a user writes it. The prefix of the top level is empty."""
    return f"'{prefix.rstrip('.')}'"


class Names:
    """The mapping from an engine's names to the keys of a checkpoint.

    Args:
        names: the names of the engine's parameters, buffers and extra states.
        prefix: the prefix of the keys of the model's copy; None: ``model``, or the only one there is.

    Raises:
        PartitaError: there is nothing below ``prefix``, or ``prefix`` is needed to choose between several copies.
    """

    def __init__(self, stored: Stored, names: Iterable[str], prefix: str | None = None) -> None:
        self.known = set(names)
        self._stored = stored
        keys = _without_optimizers(stored, [*stored.tensors, *filter(is_extra_state, stored.values)])
        copies = self._copies(keys)
        chosen = _choose(stored, copies, prefix)
        self._model = {key.removeprefix(chosen): key for key in keys if key.startswith(chosen)}
        if chosen in stored.manifest.get(AVERAGES, ()):  # the rest is not averaged
            self._model = {key.removeprefix(MODEL): key for key in keys if key.startswith(MODEL)} | self._model
        if prefix is not None and not self._model.keys() & self.known:
            raise _nothing_there(stored, chosen, copies)
        others = tuple(copy for copy in copies if copy and not chosen)
        # Names of the stored model that the engine's model lacks.
        self.unexpected = sorted(name for name in self._model.keys() - self.known if not name.startswith(others))

    def _copies(self, keys: Sequence[str]) -> list[str]:
        """Return the prefixes of the copies of the model.

        These are the prefix with the most known names, and those with at least half as many.
        """
        found = self._prefixes(keys)
        if not found:
            return []
        best = max(sorted(found), key=found.__getitem__)
        # A name may end in another one, so keys that the best prefix explains are not counted for other prefixes.
        others = self._prefixes(key for key in keys if key.removeprefix(best) not in self.known)
        return sorted({best, *(prefix for prefix, num in others.items() if 2 * num >= found[best])})

    def _prefixes(self, keys: Iterable[str]) -> Counter[str]:
        """Count the known names that follow each prefix."""
        found = Counter[str]()
        for key in keys:
            starts = (0, *(match.end() for match in re.finditer(r"\.", key)))
            found.update(key[:start] for start in starts if key[start:] in self.known)
        return found

    def model(self, names: Sequence[str]) -> str | None:
        """Return the key of a parameter, buffer or extra state with any of these names; None if there is none."""
        return next((self._model[name] for name in names if name in self._model), None)

    def states(self, names: Sequence[str]) -> dict[str, str]:
        """Return the keys of a parameter's optimizer states, by state.

        Raises:
            PartitaError: several optimizers in the checkpoint have states of the same parameter.
        """
        return next((self._states[name] for name in names if name in self._states), {})

    @cached_property
    def _states(self) -> dict[str, dict[str, str]]:
        keys = self._stored.keys
        by_prefix = dict[str, dict[str, dict[str, str]]]()
        for prefix in optimizer_prefixes(keys):
            states = defaultdict[str, dict[str, str]](dict)
            for key in keys:
                match = _STATE.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
                if match and match[1] in self.known:
                    states[match[1]][match[2]] = key
            by_prefix[prefix] = states
        holders = Counter(name for states in by_prefix.values() for name in states)
        twice = next((name for name, num in holders.items() if num > 1), None)
        if twice is None:
            return {name: found for states in by_prefix.values() for name, found in states.items()}
        usual = next((prefix for prefix in USUAL_OPTIMIZERS if prefix in by_prefix), None)
        if usual is None:
            prefixes = some_of(_shown(prefix) for prefix, states in by_prefix.items() if twice in states)
            raise PartitaError(
                f"checkpoint: '{self._stored.folder}' holds optimizer states of '{twice}' under {prefixes}, none of "
                "which is called 'optimizer': load with only_model=True"
            )
        return by_prefix[usual]

    @property
    def has_states(self) -> bool:
        return bool(self._states)
