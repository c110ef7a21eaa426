"""What ``save_pretrained`` cannot know of a model that computes in another dtype than it is saved in."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch


def keep_dtype(folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
    """Let the ``config.json`` in a folder name the dtype of the first floating-point parameter, as transformers does,
    from ``dtypes`` by name.
    """
    path = folder / "config.json"
    dtype = next((str(dtype).removeprefix("torch.") for dtype in dtypes.values() if dtype.is_floating_point), None)
    if dtype is None or not path.is_file():
        return
    content = json.loads(path.read_text())
    if content.get("dtype", dtype) != dtype:
        path.write_text(json.dumps(content | {"dtype": dtype}, indent=2, sort_keys=True) + "\n")
