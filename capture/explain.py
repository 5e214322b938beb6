"""Why a cache has not what a process asks for: the fields in which the nearest entry differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from capture.errors import CacheError
from capture.fingerprint import JSON
from capture.janitor import CachedEntry, entries
from capture.store import CacheStore

if TYPE_CHECKING:
    from capture.warmup import WarmupPlan

__all__ = ["Explanation", "FieldDifference", "explain"]


@dataclass(frozen=True)
class FieldDifference:
    """One fingerprint field: what this process has, and what the entry was built with."""

    field: str
    here: JSON
    there: JSON


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found.

    Attributes:
        entry: the fingerprint's digest: the directory that was looked for.
        hits, missing, damaged: keys of the plan's units.
        files: relative paths of damaged files, the manifest among them -> what is wrong with them.
        nearest: the entry that differs in the fewest fields, if the one that was looked for is not there.
        differences: those fields.
        unreadable: entries that could not be compared, and why.
    """

    entry: str
    hits: tuple[str, ...]
    missing: tuple[str, ...]
    damaged: tuple[str, ...]
    files: Mapping[str, str]
    nearest: str | None
    differences: tuple[FieldDifference, ...]
    unreadable: tuple[str, ...]

    def lines(self) -> list[str]:
        """The explanation for a human."""
        total = len(self.hits) + len(self.missing) + len(self.damaged)
        lines = [f"{self.entry}: units that the cache has: {len(self.hits)} of {total}"]
        lines += [f"damaged: {key}" for key in self.damaged]
        lines += [f"missing: {key}" for key in self.missing]
        lines += [f"damaged file {path}: {reason}" for path, reason in self.files.items()]
        if self.nearest is not None:
            lines.append(f"nothing was built under this fingerprint; the nearest entry is {self.nearest}, where")
            lines += [f"  {row.field} is {row.there!r}; here it is {row.here!r}" for row in self.differences]
        elif self.missing and not self.hits and not self.files:
            lines.append("the cache has no other entry to compare with")
        return lines + [f"not compared: {line}" for line in self.unreadable]

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain JSON values (schema 1)."""
        return {"schema": 1, **asdict(self)}


def explain(plan: WarmupPlan) -> Explanation:
    """Name the fields that made ``plan`` a miss, against the nearest entry of the same cache. Changes nothing."""
    keys: dict[str, list[str]] = {"hit": [], "missing": [], "damaged": []}
    for planned in plan.units:
        keys[planned.state].append(planned.unit.key)
    present = bool(keys["hit"] or plan.damaged)
    nearest, differences, unreadable = _nearest(plan, [] if present else entries(plan.store.root))
    return Explanation(
        entry=plan.fingerprint.digest,
        hits=tuple(keys["hit"]),
        missing=tuple(keys["missing"]),
        damaged=tuple(keys["damaged"]),
        files=dict(plan.damaged),
        nearest=nearest,
        differences=differences,
        unreadable=unreadable,
    )


def _nearest(
    plan: WarmupPlan, candidates: Sequence[CachedEntry]
) -> tuple[str | None, tuple[FieldDifference, ...], tuple[str, ...]]:
    """The most lately built of the entries that differ in the fewest fields."""
    nearest, fewest, unreadable = None, None, []
    for entry in candidates:
        if entry.path == plan.directory:
            continue
        try:
            found = CacheStore.of(entry.path).fingerprint
        except (CacheError, OSError) as error:
            unreadable.append(f"{entry.path.name}: {error}")
            continue
        rows = tuple(FieldDifference(*row) for row in plan.fingerprint.diff(found))
        if fewest is None or len(rows) < len(fewest):
            nearest, fewest = entry.path.name, rows
    return nearest, fewest or (), tuple(unreadable)
