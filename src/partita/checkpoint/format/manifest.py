"""partita's own index: a table for each rank's file, and a manifest with the checksums of the tables."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from partita.checkpoint.backend import Chunk, Stored, StoredTensor
from partita.checkpoint.format.record import Record
from partita.checkpoint.format.system import checksum, damaged, inside_folder, read_small
from partita.errors import PartitaError
from partita.memory.collector import collector_paused
from partita.table.box import Box

MANIFEST = "manifest.json"
# The index of torch.distributed.checkpoint, in the same folder. That library is imported only where an index is read or
# written, because it imports DTensor and sympy, which takes half a second.
METADATA = ".metadata"
# Manifest entry. Increased when readers of earlier versions would misinterpret a checkpoint.
FORMAT = 1
# Key of a manifest entry: one more than that of any earlier checkpoint in the folder.
SEQUENCE = "sequence"


@collector_paused()
def table_of(file: str, records: Iterable[Record], sums: Iterable[str], num_bytes: int) -> bytes:
    """Return the table of a rank's file, as JSON."""
    rows = list[dict[str, Any]]()
    for record, digest in zip(records, sums, strict=True):
        value, row = record.value, dict[str, Any]()
        row["key"] = value.key
        row["at"] = [record.offset, record.num_bytes, record.head_bytes]
        row["checksum"] = digest
        if value.box is not None:
            row["shape"] = value.shape
            row["dtype"] = str(value.dtype).removeprefix("torch.")
            row["box"] = [value.box.offsets, value.box.sizes]
        rows.append(row)
    return json.dumps({"file": file, "num_bytes": num_bytes, "records": rows}, separators=(",", ":")).encode()


def add_table(stored: Stored, table: bytes) -> int:
    """Add the entries of a table to ``stored``; return the number of bytes of its file."""
    made = json.loads(table)
    file = inside_folder(stored.folder, made["file"])
    for row in made["records"]:
        offset, num_bytes, head_bytes = row["at"]
        box = Box(*map(tuple, row["box"])) if "box" in row else None
        chunk = Chunk(row["key"], box, file, offset, num_bytes, head_bytes, row["checksum"])
        if box is None:
            stored.values[chunk.key] = chunk
        else:
            dtype = getattr(torch, row["dtype"])
            stored.tensors.setdefault(chunk.key, StoredTensor(tuple(row["shape"]), dtype)).chunks.append(chunk)
    return int(made["num_bytes"])


def add_aliases(stored: Stored, aliases: Mapping[str, list[str]]) -> None:
    for key, others in aliases.items():
        for other in others:
            stored.tensors[other] = stored.tensors[key]


def with_checksum(manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest, with its checksum as the last line."""
    content = json.dumps(manifest, indent=1)
    return f"{content}\n{checksum(content.encode())}\n".encode()


def read_manifest(stored: Stored) -> None:
    """Read the manifest in a checkpoint's folder, and the tables that it names, into ``stored``.

    Raises:
        PartitaError: a file is damaged, or the format is a later one.
    """
    folder = stored.folder
    content, _, digest = read_small(folder / MANIFEST).decode(errors="replace").rstrip("\n").rpartition("\n")
    if checksum(content.encode()) != digest:
        raise damaged(folder / MANIFEST)
    stored.manifest = manifest = json.loads(content)
    if manifest["format"] > FORMAT:
        by = manifest.get("versions", {}).get("partita", "a later version")
        raise PartitaError(
            f"checkpoint: '{folder}' has format {manifest['format']} (written by partita {by}): expected at most "
            f"{FORMAT}; update partita"
        )
    for name, expected in manifest["tables"].items():
        table = read_small(folder / inside_folder(folder, name))
        if checksum(table) != expected:
            raise damaged(folder / name)
        add_table(stored, table)
    add_aliases(stored, manifest["aliases"])


def has_own_metadata(stored: Stored) -> bool:
    """Return True if the ``.metadata`` file is unchanged, or the manifest has no checksum for it."""
    expected = stored.manifest.get("metadata")
    return expected is None or checksum(read_small(stored.folder / METADATA)) == expected
