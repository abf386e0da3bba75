"""What was put into a workspace: the record that a later run can be pinned to, and the text that tells the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from activities.store.blobs import BlobStore
from activities.store.port import ObjectDamaged, ObjectMissing
from activities.workspace.names import printable, readable
from activities.workspace.sources.port import SourceChanged
from contracts.base import BadInput, Contract
from contracts.blob import BlobRef
from contracts.manifest import BucketEntry, GitEntry, LocalEntry, ManifestEntry, SnapshotEntry

LISTING_BYTES, LISTING_LINES = 4096, 60
_FIRST_PATHS = 8
_DESCRIBED = 300


Name = Annotated[str, AfterValidator(readable)]
"""A name as text: any bytes may be one, and JSON takes UTF-8 alone."""


class SourceFile(Contract):
    """One file: where it lies below the entry's place, what the source calls it, and what it was. `sha256` is '' of content that
    was not fetched."""

    path: Name
    name: Name
    version: str = ""
    size: int
    sha256: str = ""


class SourceRecord(Contract):
    """What one entry brought. A list of these, as JSON, is what `pins` of a manifest names."""

    entry: str
    type: str
    source: str = Field(description="the URL, bucket or path, without any credential")
    pin: str = ""
    mode: str = "copy"
    files: tuple[SourceFile, ...]
    notes: tuple[str, ...] = ()


RECORDS = TypeAdapter(tuple[SourceRecord, ...])


async def put_records(blobs: BlobStore, records: Sequence[SourceRecord]) -> BlobRef:
    """Store the records of a run's entries."""
    return await blobs.put(RECORDS.dump_json(tuple(records)))


async def read_pins(blobs: BlobStore, ref: BlobRef | None, places: Sequence[str]) -> dict[str, SourceRecord] | None:
    """Return a manifest's pins by entry, None when it has none. Raises BadInput, and SourceChanged for those of other entries."""
    if ref is None:
        return None
    try:
        records = {record.entry: record for record in RECORDS.validate_python(json.loads(await blobs.get(ref)))}
    except (ObjectMissing, ObjectDamaged) as error:
        raise BadInput(f"manifest.pins: {error}; give the `inputs` of a run of this store") from error
    except (ValueError, ValidationError) as error:
        raise BadInput(
            f"manifest.pins: blob {ref.digest} is no list of a run's inputs; give the `inputs` of its result"
        ) from error
    for place in sorted(records.keys() ^ set(places)):
        where = "is pinned, but not in the manifest" if place in records else "is not among the pins"
        raise SourceChanged(f"manifest.entries.{place}: {where}; give the pins of a run with these very entries")
    return records


def check_pinned(pinned: SourceRecord, now: SourceRecord) -> None:
    """Raise SourceChanged naming the first file that is not what it was. What one side does not know is not compared."""
    before = {file.path: file for file in pinned.files}
    for file in now.files:
        then = before.pop(file.path, None)
        if then is None:
            raise _changed(now, pinned, file, "was not there when it was pinned")
        if then.version != file.version or then.size != file.size:
            raise _changed(
                now,
                pinned,
                file,
                f"has version {file.version!r} of {file.size} bytes, and was pinned as {then.version!r} of {then.size}",
            )
        if then.sha256 and file.sha256 and then.sha256 != file.sha256:
            raise _changed(
                now, pinned, file, f"has other content (SHA-256 {file.sha256}) than when it was pinned ({then.sha256})"
            )
    for gone in before.values():
        raise _changed(now, pinned, gone, "is not there any more")


def _changed(now: SourceRecord, pinned: SourceRecord, file: SourceFile, what: str) -> SourceChanged:
    at = f" (the source is at {now.pin}, and was at {pinned.pin})" if now.pin != pinned.pin else ""
    remedy = "restore what was there, or run without the pins"
    return SourceChanged(f"manifest.entries.{now.entry}: {file.name or file.path or now.entry!r} {what}{at}; {remedy}")


def source_of(entry: ManifestEntry) -> str:
    """Return what people call an entry's source."""
    if isinstance(entry, LocalEntry):
        return entry.path
    if isinstance(entry, GitEntry):
        return f"{entry.url}@{entry.ref}" + (f":{entry.subpath}" if entry.subpath else "")
    if isinstance(entry, BucketEntry):
        return f"{entry.type}://{entry.account + '/' if entry.account else ''}{entry.bucket}/{entry.prefix}"
    if isinstance(entry, SnapshotEntry):
        return f"{entry.run_id}" + (f"@{entry.step}" if entry.step is not None else "") + (f":{entry.path}" if entry.path else "")
    return "the manifest"


def listing(records: Sequence[SourceRecord], entries: dict[str, ManifestEntry]) -> str:
    """Tell in at most LISTING_BYTES and LISTING_LINES what lies where, without control characters."""
    heads = [_head(record, entries[record.entry]) for record in records]
    lines: list[str] = []
    used = 0
    # What entries there are comes before which files they have.
    room = LISTING_LINES - 2
    paths = max(0, min(_FIRST_PATHS, (room - len(heads)) // max(1, len(heads))))
    for number, (record, head) in enumerate(zip(records, heads, strict=True)):
        block = [head, *_paths(record, paths)]
        size = sum(len(line.encode("utf-8", "replace")) + 1 for line in block)
        if used + size > LISTING_BYTES - 100 or len(lines) + len(block) > room:
            block, size = [head], len(head.encode("utf-8", "replace")) + 1
        if used + size > LISTING_BYTES - 100 or len(lines) + 1 > room:
            lines.append(f"... and {len(records) - number} more entries")
            break
        lines += block
        used += size
    return "\n".join(lines)


def _head(record: SourceRecord, entry: ManifestEntry) -> str:
    size = sum(file.size for file in record.files)
    files = f"{len(record.files)} file{'' if len(record.files) == 1 else 's'}, {_shown_size(size)}"
    kept = {
        "lazy": f"{files}; names only, in .caisson-lazy.json; fetch_file brings the content",
        "presigned": f"a URL of the object ({_shown_size(size)}), which is valid for a while",
    }.get(record.mode, files)
    flags = ", read-only" if entry.read_only else ""
    where = f"{record.entry}.url" if record.mode == "presigned" else record.entry
    described = f" - {printable(entry.description, _DESCRIBED)}" if entry.description.strip() else ""
    return f"{printable(where, 200)} ({kept}{flags}){described}"


def _paths(record: SourceRecord, most: int) -> list[str]:
    paths = [file.path for file in record.files if file.path]
    if not paths or most < 2 or record.mode != "copy":
        return []
    shown = [f"  {printable(path, 120)}" for path in (paths if len(paths) <= most else paths[: most - 1])]
    return shown if len(paths) <= most else [*shown, f"  ... and {len(paths) - most + 1} more"]


def _shown_size(size: int) -> str:
    power = next((power for power in range(3) if size < 1000 ** (power + 1)), 3)
    return f"{size / 1000**power:.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB')[power]}"
