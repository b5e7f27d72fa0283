"""**The** checkpoint format, version 1: what stands in the files of a checkpoint folder.

A checkpoint is a folder with a few safetensors files and one `manifest.json`. A checkpoint exists only when its
manifest does: the files are written under temporary names, synced, renamed, then the folder is synced; the manifest
comes last, the same way. A reader trusts nothing that no manifest names, and checks every byte it uses.

`docs/checkpoint_format.md` is printed from this module: `python -m mula_ray.plan.format > docs/checkpoint_format.md`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mula_ray.plan.crc import combine, combine_all
from mula_ray.plan.pieces import Kind, Piece

FORMAT = "mula-ray checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
BLOCK_BYTES = 4 << 20
MAX_MANIFEST_BYTES = 1 << 30
FULL_KINDS: tuple[Kind, ...] = ("master", "exp_avg", "exp_avg_sq")
MODEL_KINDS: tuple[Kind, ...] = ("weight",)
CheckpointKind = Literal["full", "model"]

_SAFETENSORS_DTYPE = {"fp32": "F32", "bf16": "BF16"}


class FormatError(ValueError):
    """A manifest that cannot be trusted: says why."""


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a tensor as it lies in a file."""

    piece: Piece = field(metadata={"doc": "tensor name, kind, dtype, global shape, box and flat range (see below)"})
    begin: int = field(metadata={"doc": "byte of the file at which the elements begin; they are contiguous"})
    crc32: int = field(metadata={"doc": "CRC-32 of the piece's bytes"})
    blocks: tuple[int, ...] = field(
        metadata={"doc": f"CRC-32 of every {BLOCK_BYTES} bytes of the piece (the last block is shorter), left out when "
                         "there is only one; combined they give `crc32`"}
    )  # fmt: skip

    @property
    def end(self) -> int:
        """Byte of the file after the last element."""
        return self.begin + self.piece.nbytes


@dataclass(frozen=True)
class FileEntry:
    """One safetensors file of a checkpoint."""

    name: str = field(metadata={"doc": "file name inside the checkpoint folder"})
    size: int = field(metadata={"doc": "bytes"})
    header: int = field(metadata={"doc": "bytes before the first tensor: the length (8 bytes) and the JSON header"})
    header_crc32: int = field(metadata={"doc": "CRC-32 of these bytes"})
    crc32: int = field(metadata={"doc": "CRC-32 of the whole file: header and pieces combined"})
    pieces: tuple[StoredPiece, ...] = field(metadata={"doc": "what lies in it, in the order of the bytes"})

    def to_json(self) -> dict[str, Any]:
        """The entry as it stands in the manifest (also how a writer hands it to the driver)."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**plain, "pieces": [_piece_to_json(stored) for stored in self.pieces]}

    @staticmethod
    def from_json(data: Mapping[str, Any], sums: bool = True) -> FileEntry:
        """Parse and check (`sums`: that the checksums combine, too); raises FormatError."""
        try:
            pieces = tuple(_piece_from_json(item) for item in data["pieces"])
            size, header, header_crc, crc = (
                _typed(data, key, int) for key in ("size", "header", "header_crc32", "crc32")
            )
            entry = FileEntry(_typed(data, "name", str), size, header, header_crc, crc, pieces)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"a file entry is malformed: {error!r}") from error
        entry.check(sums)
        return entry

    def check(self, sums: bool) -> None:
        """The parts lie back to back and their CRCs combine to the file's; raises FormatError."""
        if "/" in self.name or self.name in ("", ".", "..", MANIFEST):
            raise FormatError(f"file name {self.name!r} is not a plain name")
        at, total = self.header, self.header_crc32
        for stored in self.pieces:
            if stored.begin != at:
                raise FormatError(f"{self.name}: {stored.piece.name} begins at byte {stored.begin}, expected {at}")
            blocks = block_lengths(stored.piece.nbytes)
            if len(blocks) != len(stored.blocks):
                raise FormatError(f"{self.name}: {stored.piece.name} has {len(stored.blocks)} block checksums")
            if sums and combine_all(zip(stored.blocks, blocks, strict=True)) != stored.crc32:
                raise FormatError(f"{self.name}: block checksums of {stored.piece.name} do not give its checksum")
            at = stored.end
            total = combine(total, stored.crc32, stored.piece.nbytes) if sums else total
        if at != self.size or (sums and total != self.crc32):
            raise FormatError(f"{self.name}: pieces do not add up to the size and checksum of the file")


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says about the run that wrote it."""

    step: int = field(metadata={"doc": "completed optimizer steps; training goes on with this step number"})
    cursor: int = field(metadata={"doc": "global samples consumed: the data position, whatever the layout"})
    tokens: int = field(metadata={"doc": "tokens consumed"})
    generation: int = field(metadata={"doc": "generation of rank processes that wrote it (fencing, and order)"})
    run_id: str = field(metadata={"doc": "the run"})
    data_hash: str = field(default="", metadata={"doc": "content hash of the token set"})
    config: Mapping[str, Any] = field(default_factory=dict, metadata={"doc": "the resolved configuration"})
    layout: Mapping[str, Any] = field(default_factory=dict, metadata={"doc": "world, dp, ep, tp, pp, optimizer: a fact about the writer; readers need none of it"})  # fmt: skip  # noqa: E501
    rng: Mapping[str, Any] = field(default_factory=dict, metadata={"doc": "seeds and random state that are not a function of the step"})  # fmt: skip  # noqa: E501
    versions: Mapping[str, str] = field(default_factory=dict, metadata={"doc": "software versions"})
    extra: Mapping[str, Any] = field(default_factory=dict, metadata={"doc": "anything else the writer keeps; readers ignore what they do not know"})  # fmt: skip  # noqa: E501


@dataclass(frozen=True)
class Manifest:
    """The manifest: the facts, the files, and nothing that the checksum does not cover."""

    kind: CheckpointKind
    facts: Facts
    files: tuple[FileEntry, ...]
    created: str

    @property
    def nbytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(entry.size for entry in self.files)

    @property
    def order(self) -> tuple[int, int]:
        """What "newer" means: a later generation first (it may have been rolled back on purpose), then the step."""
        return self.facts.generation, self.facts.step

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape of every tensor name."""
        return {stored.piece.name: stored.piece.global_shape for entry in self.files for stored in entry.pieces}

    def dump(self) -> bytes:
        """The file's bytes: JSON with sorted keys and a SHA-256 of itself."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "created": self.created,
            "facts": {f.name: getattr(self.facts, f.name) for f in dataclasses.fields(Facts)},
            "files": [entry.to_json() for entry in self.files],
        }
        return _canonical({**body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})

    @staticmethod
    def load(data: bytes) -> Manifest:
        """Parse and check all that the manifest says about itself; raises FormatError."""
        try:
            body = json.loads(data)
            stated = body.pop("sha256")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise FormatError(f"not a manifest: {error!r}") from error
        if body.get("format") != FORMAT:
            raise FormatError(f"format is {body.get('format')!r}, expected {FORMAT!r}")
        if body.get("version") != VERSION:
            raise FormatError(
                f"format version {body.get('version')!r} is unknown; this program reads version {VERSION}"
            )
        if hashlib.sha256(_canonical(body)).hexdigest() != stated or _canonical({**body, "sha256": stated}) != data:
            raise FormatError("the manifest's SHA-256 does not match its content")
        try:
            known = {f.name for f in dataclasses.fields(Facts)}
            facts = Facts(**{key: value for key, value in body["facts"].items() if key in known})
            files = tuple(FileEntry.from_json(item, sums=False) for item in body["files"])  # SHA-256 has vouched
            manifest = Manifest(body["kind"], facts, files, body["created"])
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"the manifest is malformed: {error!r}") from error
        if manifest.kind not in get_args(CheckpointKind) or len({e.name for e in files}) != len(files):
            raise FormatError("the manifest names an unknown kind or one file twice")
        return manifest


def block_lengths(nbytes: int) -> list[int]:
    """Lengths of the blocks of a piece of `nbytes` bytes."""
    return [min(BLOCK_BYTES, nbytes - at) for at in range(0, nbytes, BLOCK_BYTES)]


def piece_key(piece: Piece) -> str:
    """Name of the piece in the safetensors header: `name:kind`, then box and flat range where not all of it."""
    key = f"{piece.name}:{piece.kind}"
    if piece.shape != piece.global_shape:
        key += ":" + ",".join(f"{o}+{s}" for o, s in zip(piece.offset, piece.shape, strict=True))
    if piece.numel != _numel(piece.shape):
        key += f":{piece.start}-{piece.stop}"
    return key


def safetensors_header(pieces: Sequence[Piece]) -> bytes:
    """Length and JSON header of a safetensors file whose tensors are `pieces`, back to back in this order.

    A piece that is its whole box has the box's shape; a part of a box is flat.
    """
    header: dict[str, Any] = {"__metadata__": {"format": f"{FORMAT} {VERSION}"}}
    at = 0
    for piece in pieces:
        shape = list(piece.shape) if piece.numel == _numel(piece.shape) else [piece.numel]
        key = piece_key(piece)
        assert key not in header, f"{key} twice in one file"
        header[key] = {
            "dtype": _SAFETENSORS_DTYPE[piece.dtype],
            "shape": shape,
            "data_offsets": [at, at + piece.nbytes],
        }
        at += piece.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _piece_to_json(stored: StoredPiece) -> dict[str, Any]:
    plain = {f.name: getattr(stored.piece, f.name) for f in dataclasses.fields(Piece)}
    plain |= {"begin": stored.begin, "crc32": stored.crc32}
    return plain if len(stored.blocks) == 1 else {**plain, "blocks": stored.blocks}


def _piece_from_json(data: Mapping[str, Any]) -> StoredPiece:
    dims = {key: tuple(int(x) for x in data[key]) for key in ("global_shape", "offset", "shape")}
    if data["kind"] not in get_args(Kind) or data["dtype"] not in _SAFETENSORS_DTYPE:
        raise FormatError(f"unknown kind {data['kind']!r} or dtype {data['dtype']!r}")
    start, stop, begin, crc = (_typed(data, key, int) for key in ("start", "stop", "begin", "crc32"))
    piece = Piece(_typed(data, "name", str), data["kind"], data["dtype"], **dims, start=start, stop=stop)
    return StoredPiece(piece, begin, crc, tuple(data.get("blocks", (crc,))))


def _typed(data: Mapping[str, Any], key: str, kind: type) -> Any:
    value = data[key]
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise FormatError(f"{key} is {value!r}, expected {kind.__name__}")
    return value


def _canonical(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _table(cls: type) -> str:
    rows = [f"| `{f.name}` | {f.metadata.get('doc', '')} |" for f in dataclasses.fields(cls)]
    return "\n".join(["| field | meaning |", "|---|---|", *rows])


def render_doc() -> str:
    """The text of docs/checkpoint_format.md."""
    assert __doc__ is not None
    assert Piece.__doc__ is not None
    return f"""<!-- Printed by `python -m mula_ray.plan.format`; edit mula_ray/plan/format.py instead. -->
# Checkpoint format, version {VERSION}

{__doc__.split("`docs/")[0].strip().replace("**The** checkpoint", "The checkpoint")}

## Folder

| entry | what |
|---|---|
| `{MANIFEST}` | the manifest, written last |
| `node-<node>-<part>.safetensors` | payload, at most 4 a node; opens with any safetensors reader |

In a run's `checkpoints/`: `full-a` and `full-b` alternate (kinds {", ".join(FULL_KINDS)}), `model-<step>` are kept
(kind {", ".join(MODEL_KINDS)}), `new-…` is a save under way or committed but not yet moved to its slot, `lease.json`
names the one writer. Which of them is the latest is found by reading manifests, never by a pointer.

## Manifest

JSON, UTF-8, sorted keys, no white space. `format` is "{FORMAT}", `version` {VERSION}, `kind` "full" or "model",
`created` a time with zone, `sha256` the SHA-256 of the same JSON without `sha256`. Newer means: higher generation, then
higher step.

### `facts`

{_table(Facts)}

### `files`

{_table(FileEntry)}

### `pieces` of a file

{_table(StoredPiece)}

A piece: {Piece.__doc__.split(chr(10) * 2)[0].strip()} The fields of `piece` stand beside the others: `name`, `kind`,
`dtype` (fp32, bf16), `global_shape`, `offset`, `shape`, `start`, `stop`. Together the pieces of a name and a kind
cover the tensor exactly: no element is missing or stored twice. Names are those of Hugging Face's OLMoE and OLMo, with
the experts of a layer stacked: `mlp.experts.gate_up_proj` (E, 2I, H), gate rows first, `mlp.experts.down_proj`
(E, H, I).

In the safetensors header a piece is called `name:kind`, followed by `:offset+size,…` when its box is not the whole
tensor and by `:start-stop` when it is not the whole box.
"""


if __name__ == "__main__":
    print(render_doc(), end="")
