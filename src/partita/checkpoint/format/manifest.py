"""partita's own index: a table of each rank's file, and a manifest that vouches for the tables."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from partita.checkpoint.backend import Chunk, Stored, StoredTensor
from partita.checkpoint.format.record import Record
from partita.checkpoint.format.system import checksum, damaged, inside_folder, read_small
from partita.errors import PartitaError
from partita.memory.collector import collector_paused
from partita.plan.box import Box

MANIFEST = "manifest.json"
# The index of torch.distributed.checkpoint, beside it. Who reads or writes one imports that library then: it brings
# DTensor and sympy, which take half a second.
METADATA = ".metadata"
# In a manifest: raised when readers of earlier versions would take something for what it is not.
FORMAT = 1
# In a manifest: one more than that of any checkpoint that was in the folder before.
SEQUENCE = "sequence"


@collector_paused()
def table_of(file: str, records: Iterable[Record], sums: Iterable[str], num_bytes: int) -> bytes:
    """What is known of a rank's file, as JSON."""
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
    """Take up what a table says; returns the number of bytes of its file."""
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


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """A manifest whose last line is its checksum."""
    content = json.dumps(manifest, indent=1)
    return f"{content}\n{checksum(content.encode())}\n".encode()


def read_manifest(stored: Stored) -> None:
    """Take up what the manifest in a checkpoint's folder, and the tables that it names, say.

    Raises:
        PartitaError: they are damaged, or of a later format.
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
    """Whether the index of torch.distributed.checkpoint is the one that was written; True where nothing vouches for
    it.
    """
    expected = stored.manifest.get("metadata")
    return expected is None or checksum(read_small(stored.folder / METADATA)) == expected
