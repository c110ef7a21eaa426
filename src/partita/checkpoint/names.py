"""Which stored keys belong to which parameters, whatever prefix the writer's state dict gave them."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from partita.checkpoint.stored import Stored

# As get_optimizer_state_dict nests them: state.<parameter>.<state>.
_STATE = re.compile(r"(?:.*?\.)?state\.(.+)\.([^.]+)")
_GROUPS = re.compile(r"(?:.*?\.)?param_groups\..*")
# Parameters that are looked at to find the prefix.
NUM_LOOKED_AT = 20


def model_keys(stored: Stored) -> dict[str, str]:
    """The keys of a checkpoint's model by their names in it, where no engine says what the names are."""
    keys = [key for key in stored.tensors if not _STATE.fullmatch(key) and not _GROUPS.fullmatch(key)]
    prefix = "model." if any(key.startswith("model.") for key in keys) else ""
    return {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}


class Names:
    """``names`` are those of the engine's parameters and buffers."""

    def __init__(self, stored: Stored, names: Iterable[str]) -> None:
        self.known = set(names)
        self.keys = stored.tensors.keys() | stored.values.keys()
        self._states: dict[str, dict[str, str]] = defaultdict(dict)
        model_keys = set[str]()
        for key in self.keys:
            match = _STATE.fullmatch(key)
            if match and match[1] in self.known:
                self._states[match[1]][match[2]] = key
            elif key in stored.tensors and not _GROUPS.fullmatch(key):
                model_keys.add(key)
        self._prefix = self._find_prefix(model_keys)
        self._model = {key.removeprefix(self._prefix): key for key in model_keys if key.startswith(self._prefix)}

    def _find_prefix(self, model_keys: Iterable[str]) -> str:
        looked_at = sorted(self.known, key=len, reverse=True)[:NUM_LOOKED_AT]
        ends = Counter(
            key.removesuffix(name)
            for key in model_keys
            for name in looked_at
            if key == name or key.endswith("." + name)
        )
        return ends.most_common(1)[0][0] if ends else ""

    def model(self, names: Sequence[str]) -> str | None:
        """The key of a parameter or buffer with any of these names."""
        return next((self._model[name] for name in names if name in self._model), None)

    def states(self, names: Sequence[str]) -> dict[str, str]:
        """The keys of a parameter's optimizer states, by state."""
        return next((self._states[name] for name in names if name in self._states), {})

    @property
    def strange(self) -> list[str]:
        """Stored names of the model that the engine's has not."""
        return sorted(self._model.keys() - self.known)

    @property
    def has_states(self) -> bool:
        return bool(self._states)
