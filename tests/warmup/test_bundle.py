from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import stat
import tarfile
import threading
import uuid
from pathlib import Path

import pytest
import zstandard

from capture import CacheStore, WarmupManager, WarmupReport
from capture.bundle import Bundle, bundle_name, pack, pull, push, unpack
from capture.errors import BundleError, CacheAccessError, CacheCorruptError
from capture.fingerprint import environment_fields
from capture.manifest import FileRecord, Manifest
from capture.relocate import is_group, located, portable
from tests.warmup.bundles import Member, archive, manifest_of, member, place
from tests.warmup.toys import FileUnit, kernels, toy_spec

SPEC = toy_spec(*kernels(2))
FIELDS = environment_fields("cpu")


def warm_up(cache: Path, spec: object = SPEC) -> WarmupReport:
    manager = WarmupManager(cache)
    return manager.run(manager.plan(spec), progress=False)  # type: ignore[arg-type]


def states(report: WarmupReport) -> list[str]:
    return [unit.state for unit in report.units]


def entry(cache: Path) -> Path:
    return WarmupManager(cache).plan(SPEC).directory


@pytest.fixture
def packed(cache: Path, tmp_path: Path) -> Bundle:
    warm_up(cache)
    return pack(entry(cache), str(tmp_path / "bundle.tar.zst"))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The root of a cache on another machine."""
    return tmp_path / "other"


def snapshot(root: Path) -> dict[str, bytes]:
    """The files of the entries of a cache: what a start could load."""
    return {str(path): path.read_bytes() for path in root.glob("*/*/**/*") if path.is_file()}


def test_a_bundle_makes_another_cache_warm(packed: Bundle, other: Path) -> None:
    unpacked = unpack(packed.url, digest=packed.digest, cache_dir=other, device="cpu")
    assert set(unpacked.taken) == set(unpacked.units) == {"kernel-0", "kernel-1"}
    assert states(warm_up(other)) == ["hit", "hit"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (other, entry(other))} == {0o700}


def test_the_same_entry_gives_the_same_digest_wherever_it_lies(packed: Bundle, other: Path, tmp_path: Path) -> None:
    unpack(packed.url, digest=packed.digest, cache_dir=other, device="cpu")
    again = pack(entry(other), str(tmp_path / "again.tar.zst"))
    assert again.digest == packed.digest


def test_what_the_cache_has_stays_and_the_rest_is_added(packed: Bundle, other: Path) -> None:
    warm_up(other, toy_spec(kernels(1)[0], FileUnit(key="own")))
    before = {path: path.stat().st_mtime_ns for path in (entry(other) / "triton").rglob("*.*")}
    assert unpack(packed.url, digest=packed.digest, cache_dir=other, device="cpu").taken == ("kernel-1",)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert states(warm_up(other, toy_spec(*kernels(2), FileUnit(key="own")))) == ["hit"] * 3


def test_a_damaged_entry_is_repaired_by_a_bundle(packed: Bundle, cache: Path) -> None:
    path = entry(cache) / "triton/kernel-1/kernel.bin"
    path.write_text("damaged")
    assert unpack(packed.url, digest=packed.digest, cache_dir=cache, device="cpu").taken == ("kernel-1",)
    assert states(warm_up(cache)) == ["hit", "hit"]


def test_a_second_unpack_fetches_nothing(packed: Bundle, other: Path) -> None:
    unpack(packed.url, digest=packed.digest, cache_dir=other, device="cpu")
    Path(packed.url).unlink()
    again = unpack(packed.url, digest=packed.digest, cache_dir=other, device="cpu")
    assert (again.taken, set(again.units)) == ((), {"kernel-0", "kernel-1"})
    (entry(other) / "triton/kernel-0/kernel.bin").unlink()
    with pytest.raises(BundleError, match="cannot be fetched"):
        unpack(packed.url, digest=packed.digest, cache_dir=other, device="cpu")


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_folder_url_holds_one_bundle_for_each_fingerprint(
    scheme: str, cache: Path, other: Path, tmp_path: Path
) -> None:
    warm_up(cache)
    base = f"memory://{uuid.uuid4()}" if scheme == "memory" else f"file://{tmp_path}/made"
    pushed = push(entry(cache), base)
    assert pushed.url == bundle_name(base, entry(cache).name)
    pull(base, entry(cache).name, digest=pushed.digest, cache_dir=other, device="cpu")
    assert states(warm_up(other)) == ["hit", "hit"]


def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(cache: Path, tmp_path: Path) -> None:
    warm_up(cache)
    (tmp_path / "volume").mkdir()
    link, file = tmp_path / "bundle.tar.zst", tmp_path / "volume/bundle.tar.zst"
    link.symlink_to(file)
    bundle = pack(entry(cache), str(link))
    assert link.is_symlink()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == bundle.digest.removeprefix("sha256:")


def test_a_pipe_is_written_to_and_stays(cache: Path, tmp_path: Path) -> None:
    warm_up(cache)
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    bundle = pack(entry(cache), str(pipe))
    stayed = pipe.is_fifo()
    pipe.unlink()
    reader.join(30)
    assert stayed
    assert hashlib.sha256(read[0]).hexdigest() == bundle.digest.removeprefix("sha256:")


def test_a_device_is_written_to_and_stays(cache: Path, tmp_path: Path) -> None:
    warm_up(cache)
    link = tmp_path / "null"
    link.symlink_to("/dev/null")  # in a folder of the test: where /dev/null itself went, a failure would do harm
    pack(entry(cache), str(link))
    assert link.is_char_device()


def test_a_file_name_with_two_colons_is_no_chain_of_file_systems(
    cache: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up(cache)
    monkeypatch.chdir(tmp_path)
    bundle = pack(entry(cache), "a::b.tar.zst")
    assert unpack("a::b.tar.zst", digest=bundle.digest, cache_dir=other, device="cpu").taken


def test_a_wrong_digest_is_refused_before_anything_is_opened(
    packed: Bundle, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.bundle.read_archive", lambda *arguments: pytest.fail("opened"))
    with pytest.raises(BundleError, match=r"its digest is sha256:.*nothing of it was opened"):
        unpack(packed.url, digest=f"sha256:{'0' * 64}", cache_dir=other, device="cpu")
    assert not snapshot(other)


@pytest.mark.parametrize("digest", ["", "md5:00", "sha256:12", "0" * 64], ids=["empty", "md5", "short", "bare"])
def test_what_is_no_digest_is_a_usage_error(digest: str, packed: Bundle, other: Path) -> None:
    with pytest.raises(ValueError, match="digest must be"):
        unpack(packed.url, digest=digest, cache_dir=other)


def test_every_flipped_byte_is_refused(packed: Bundle, other: Path) -> None:
    data = Path(packed.url).read_bytes()
    for position in range(0, len(data), max(1, len(data) // 40)):
        changed = bytearray(data)
        changed[position] ^= 0x01
        Path(packed.url).write_bytes(changed)
        with pytest.raises(BundleError, match="its digest is"):
            unpack(packed.url, digest=packed.digest, cache_dir=other, device="cpu")


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self._path), os.O_CREAT)


def test_a_pickle_is_never_loaded_before_the_digest_holds(other: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    files = {"inductor/fxgraph/evil": pickle.dumps(Bomb(trace))}
    manifest = manifest_of(files, FIELDS)
    data = archive(member("manifest.json", manifest.render()), *(member(*item) for item in files.items()))
    url, digest = place(tmp_path / "evil.tar.zst", data)
    with pytest.raises(BundleError, match="digest"):
        unpack(url, digest="sha256:" + "0" * 64, cache_dir=other, device="cpu")
    unpack(url, digest=digest, cache_dir=other, device="cpu")
    assert not trace.exists()  # not even then: only a compiler that is asked for it loads it


GOOD = {"triton/a/kernel.bin": b"kernel"}
MANIFEST = manifest_of(GOOD, FIELDS)


def listed(path: str, data: bytes = b"kernel") -> tuple[Member, ...]:
    """A bundle whose manifest lists ``path``."""
    return member("manifest.json", manifest_of({path: data}, FIELDS).render()), member(path, data)


def with_kernel(*members: Member) -> tuple[Member, ...]:
    """A bundle whose manifest is good, with these members."""
    return member("manifest.json", MANIFEST.render()), *members


KERNEL = member("triton/a/kernel.bin", b"kernel")
ATTACKS: dict[str, tuple[tuple[Member, ...], str]] = {
    "parent path in the manifest": (listed("triton/../../evil"), "leaves the cache directory"),
    "absolute path in the manifest": (listed("/tmp/evil"), "leaves the cache directory"),
    "manifest lists itself": (listed("manifest.json"), "no place for a cached file"),
    "unknown folder": (listed("quarantine/a"), "no place for a cached file"),
    "dot in a path": (listed("triton/./a"), "no place for a cached file"),
    "newline in a path": (listed("triton/a\nb"), "no place for a cached file"),
    "folder as a file": (listed("triton"), "no place for a cached file"),
    "parent path": (with_kernel(member("../evil", b"kernel")), "where its manifest lists"),
    "absolute path": (with_kernel(member("/tmp/evil", b"kernel")), "where its manifest lists"),
    "symbolic link": (with_kernel(member(KERNEL[0].name, kind=tarfile.SYMTYPE, link="/etc/passwd")), "links"),
    "hard link": (with_kernel(member(KERNEL[0].name, kind=tarfile.LNKTYPE, link="manifest.json")), "links"),
    "device": (with_kernel(member(KERNEL[0].name, kind=tarfile.CHRTYPE)), "devices are refused"),
    "pipe": (with_kernel(member(KERNEL[0].name, kind=tarfile.FIFOTYPE)), "not a regular file"),
    "directory": (with_kernel(member("triton", kind=tarfile.DIRTYPE), KERNEL), "not a regular file"),
    "other contents": (with_kernel(member(KERNEL[0].name, b"kernem")), "sha256"),
    "other size": (with_kernel(member(KERNEL[0].name, b"kernel and more")), "its manifest says"),
    "missing file": (with_kernel(), "is missing"),
    "extra file": (with_kernel(KERNEL, member("triton/z", b"evil")), "does not list"),
    "file twice": (with_kernel(KERNEL, KERNEL), "does not list"),
    "no manifest": ((KERNEL,), "where its manifest lists 'manifest.json'"),
    "damaged manifest": ((member("manifest.json", MANIFEST.render()[:-9]), KERNEL), "manifest cannot be read"),
    "empty": ((), "is missing"),
}


@pytest.mark.parametrize(("members", "reason"), ATTACKS.values(), ids=ATTACKS.keys())
def test_a_bad_bundle_with_a_good_digest_changes_nothing(
    members: tuple[Member, ...], reason: str, cache: Path, tmp_path: Path
) -> None:
    warm_up(cache)
    before = snapshot(tmp_path)
    url, digest = place(tmp_path / "evil.tar.zst", archive(*members))
    with pytest.raises(BundleError, match=reason):
        unpack(url, digest=digest, cache_dir=cache, device="cpu")
    assert snapshot(tmp_path) == before
    assert not list(cache.glob("incoming-*/"))
    assert states(warm_up(cache)) == ["hit", "hit"]


def refused(data: bytes, tmp_path: Path, other: Path, reason: str, max_bytes: int = 2**20) -> None:
    url, digest = place(tmp_path / "evil.tar.zst", data)
    with pytest.raises(BundleError, match=reason):
        unpack(url, digest=digest, cache_dir=other, device="cpu", max_bytes=max_bytes)
    assert not snapshot(other)


def test_a_declared_bomb_is_refused_by_its_manifest(tmp_path: Path, other: Path) -> None:
    zeros = bytes(2**24)
    data = archive(*listed("triton/zeros", zeros))
    assert len(data) < 2**14
    refused(data, tmp_path, other, "unpacks to 16777216 bytes, more than the limit")


def test_a_bomb_in_a_header_is_never_read(tmp_path: Path, other: Path) -> None:
    bomb = member("triton/a/kernel.bin", b"kernel")
    bomb[0].pax_headers = {"comment": "0" * 2**23}
    refused(archive(*with_kernel(bomb)), tmp_path, other, "unpacks to more than its manifest says")


def test_what_lies_behind_the_archive_is_never_read(tmp_path: Path, other: Path) -> None:
    def padded(tar: bytes) -> bytes:
        return zstandard.ZstdCompressor().compress(tar + b"\1" * 2**24)

    url, digest = place(tmp_path / "padded.tar.zst", archive(*with_kernel(KERNEL), compress=padded))
    bundle = unpack(url, digest=digest, cache_dir=other, device="cpu", max_bytes=2**20)
    assert [path.name for path in (other / bundle.entry / "triton").rglob("*.*")] == ["kernel.bin"]


def test_a_download_stops_at_the_limit(packed: Bundle, other: Path) -> None:
    with pytest.raises(BundleError, match="larger than the limit of 100 bytes"):
        unpack(packed.url, digest=packed.digest, cache_dir=other, device="cpu", max_bytes=100)


@pytest.mark.parametrize("data", [b"", b"not zstd", b"\x28\xb5\x2f\xfd" + b"\0" * 40], ids=["empty", "text", "magic"])
def test_what_is_no_archive_is_refused(data: bytes, tmp_path: Path, other: Path) -> None:
    refused(data, tmp_path, other, "is refused")


def test_a_negative_size_is_refused(tmp_path: Path, other: Path) -> None:
    manifest = Manifest(FIELDS, {}, {"triton/a": FileRecord(-1, "")})
    refused(archive(member("manifest.json", manifest.render())), tmp_path, other, "negative")


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_bundle_of_another_machine_is_refused_and_the_field_named(name: str, tmp_path: Path, other: Path) -> None:
    manifest = manifest_of(GOOD, {**FIELDS, name: "something else"})
    data = archive(member("manifest.json", manifest.render()), KERNEL)
    refused(data, tmp_path, other, rf"another machine or version \({name} is .* here and 'something else' there\)")


def test_a_switch_of_the_builders_environment_is_named(tmp_path: Path, other: Path) -> None:
    manifest = manifest_of(GOOD, {**FIELDS, "env.TRITON_DEBUG": "1"})
    refused(archive(member("manifest.json", manifest.render()), KERNEL), tmp_path, other, "env.TRITON_DEBUG is")


def test_for_an_image_no_machine_is_asked_for(tmp_path: Path, other: Path) -> None:
    manifest = manifest_of(GOOD, {**FIELDS, "arch": "sm_90"})
    url, digest = place(tmp_path / "image.tar.zst", archive(member("manifest.json", manifest.render()), KERNEL))
    bundle = unpack(url, digest=digest, cache_dir=other, elsewhere=True)
    assert CacheStore.of(other / bundle.entry).check().intact == {"unit"}


def test_what_was_unpacked_for_an_image_is_refused_where_it_must_fit(tmp_path: Path, other: Path) -> None:
    manifest = manifest_of(GOOD, {**FIELDS, "arch": "sm_90"})
    url, digest = place(tmp_path / "image.tar.zst", archive(member("manifest.json", manifest.render()), KERNEL))
    unpack(url, digest=digest, cache_dir=other, elsewhere=True)
    with pytest.raises(BundleError, match="another machine or version"):
        unpack(url, digest=digest, cache_dir=other, device="cpu")


def test_a_damaged_entry_is_not_packed(cache: Path, tmp_path: Path) -> None:
    warm_up(cache)
    path = entry(cache) / "triton/kernel-0/kernel.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CacheCorruptError, match="is not what the manifest says"):
        pack(entry(cache), str(tmp_path / "bundle.tar.zst"))
    assert not list(tmp_path.glob("*bundle*"))


def test_a_file_name_that_unpack_would_refuse_is_not_packed(cache: Path, tmp_path: Path) -> None:
    warm_up(cache, toy_spec(FileUnit(key="kernel", files=("line\nbreak",))))
    with pytest.raises(BundleError, match=r"'triton/kernel/line\\nbreak'"):
        pack(WarmupManager(cache).plan(toy_spec(FileUnit(key="kernel"))).directory, str(tmp_path / "bundle.tar.zst"))
    assert not (tmp_path / "bundle.tar.zst").exists()


def test_an_entry_without_manifest_is_not_packed(cache: Path, tmp_path: Path) -> None:
    WarmupManager(cache).plan(SPEC).store.prepare()
    with pytest.raises(CacheCorruptError, match="has no manifest"):
        pack(entry(cache), str(tmp_path / "bundle.tar.zst"))


def test_a_file_system_that_only_reads_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads_only(url: str, mode: str) -> None:
        raise NotImplementedError  # as fsspec's HTTP does

    warm_up(cache)
    monkeypatch.setattr("capture.bundle._open", reads_only)
    with pytest.raises(BundleError, match=r"cannot be written \(NotImplementedError: fsspec cannot write there\)"):
        pack(entry(cache), "http://example.org/bundle.tar.zst")


def test_a_full_disk_leaves_the_cache_as_it_was(packed: Bundle, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.bundle.shutil.disk_usage", lambda root: type("usage", (), {"free": 100}))
    with pytest.raises(BundleError, match="more than the limit of 100"):
        unpack(packed.url, digest=packed.digest, cache_dir=other, device="cpu")
    monkeypatch.undo()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BundleError, match="cannot be written: No space left on device"):
        unpack(packed.url, digest=packed.digest, cache_dir=other, device="cpu")
    assert not snapshot(other)


def test_a_root_that_others_can_write_takes_no_bundle(packed: Bundle, other: Path) -> None:
    other.mkdir()
    other.chmod(0o777)
    with pytest.raises(CacheAccessError, match="can be written by others"):
        unpack(packed.url, digest=packed.digest, cache_dir=other, device="cpu")


def test_an_unpack_that_was_killed_leaves_nothing_in_the_way(packed: Bundle, other: Path) -> None:
    left = other / f"incoming-{packed.digest.removeprefix('sha256:')[:20]}"
    (left / "triton").mkdir(parents=True)
    (left / "bundle.tar.zst").write_text("half")
    other.chmod(0o700)
    unpack(packed.url, digest=packed.digest, cache_dir=other, device="cpu")
    assert not left.exists()
    assert states(warm_up(other)) == ["hit", "hit"]


def test_a_group_file_keeps_names_and_takes_any_directory() -> None:
    data = json.dumps({"child_paths": {"k.json": "/old/k.json", "k.cubin": "/old/k.cubin"}}).encode()
    moved = located(data, Path("/new"))
    assert json.loads(moved)["child_paths"] == {"k.json": "/new/k.json", "k.cubin": "/new/k.cubin"}
    assert portable(moved) == portable(data) != data
    assert is_group("triton/KEY/__grp__k.json")
    assert not is_group("triton/__grp__/k.json")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"child_paths": 3}', b'{"child_paths": {"a": 1}}'])
def test_what_is_no_group_file_stays(data: bytes) -> None:
    assert located(data, Path("/new")) == portable(data) == data


def test_a_group_file_cannot_point_out_of_its_directory() -> None:
    data = json.dumps({"child_paths": {"k.cubin": "../../other/k.cubin"}}).encode()
    assert json.loads(located(data, Path("/new")))["child_paths"] == {"k.cubin": "/new/k.cubin"}
