from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch

from capture.fingerprint import ABSENT, ENVIRONMENT_SWITCHES, Fingerprint, environment_fields

FIELDS = {
    **environment_fields("cpu"),
    "hidden_size": 2048,
    "rope": {"factor": 40, "type": "yarn"},
    "sizes": [1, 2],
}


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_another_value_of_any_field_is_another_digest_and_named(name: str) -> None:
    ours = Fingerprint(FIELDS)
    theirs = Fingerprint({**FIELDS, name: "something else"})
    assert ours.digest != theirs.digest
    assert {difference[0].split(".")[0] for difference in ours.diff(theirs)} == {name}


def test_a_nested_field_is_named_by_its_path() -> None:
    theirs = Fingerprint({**FIELDS, "rope": {"factor": 20, "type": "yarn"}})
    assert Fingerprint(FIELDS).diff(theirs) == [("rope.factor", 40, 20)]


def test_a_missing_field_differs_from_a_null_one() -> None:
    assert Fingerprint({}).diff(Fingerprint({"hip": None})) == [("hip", ABSENT, None)]


def test_order_and_kind_of_sequence_do_not_matter() -> None:
    assert Fingerprint({"a": [1, 2], "b": 1}).digest == Fingerprint({"b": 1, "a": (1, 2)}).digest


@pytest.mark.parametrize(
    "value",
    [float("nan"), object(), {1, 2}, {2: "a", 10: "b"}, [{"a": {None: 1}}]],
    ids=["nan", "object", "set", "keys", "nested-keys"],
)
def test_what_is_not_json_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match="'scale' is not JSON"):
        Fingerprint({"scale": value})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ENVIRONMENT_SWITCHES)
@pytest.mark.parametrize("value", ["1", ""], ids=["set", "empty"])
def test_a_compiler_switch_enters_by_being_present(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    without = environment_fields("cpu")
    monkeypatch.setenv(name, value)
    differences = Fingerprint(without).diff(Fingerprint(environment_fields("cpu")))
    assert differences == [(f"env.{name}", ABSENT, value)]


@pytest.mark.parametrize(
    "name",
    [
        *("HOME", "USER", "XDG_CACHE_HOME", "HOSTNAME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"),
        *("CUDA_VISIBLE_DEVICES", "TRITON_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    ],
)
def test_places_and_ranks_do_not_enter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment_fields("cpu")
    monkeypatch.setenv(name, "7")
    assert environment_fields("cpu") == before


def test_the_working_directory_does_not_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment_fields("cpu")
    monkeypatch.chdir(tmp_path)
    assert environment_fields("cpu") == before


def test_no_field_holds_a_path() -> None:
    assert not [value for value in environment_fields("cpu").values() if "/" in str(value)]


def test_threads_enter_on_a_cpu_because_inductor_specialises_to_them() -> None:
    before, threads = environment_fields("cpu"), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert Fingerprint(before).diff(Fingerprint(environment_fields("cpu")))[0][0] == "threads"
    finally:
        torch.set_num_threads(threads)


class _Properties:
    name = "some chip"
    gcnArchName = "gfx942:sramecc+:xnack-"  # torch's name for it
    major, minor = 9, 0
    multi_processor_count = 304


@pytest.mark.parametrize(("hip", "arch"), [("7.2", "gfx942:sramecc+:xnack-"), (None, "sm_90")], ids=["rocm", "cuda"])
def test_a_gpu_enters_by_name_and_full_architecture(
    hip: str | None, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Properties)
    fields = environment_fields("cuda:3")
    assert (fields["arch"], fields["device_name"], fields["hip"]) == (arch, "some chip", hip)
    assert fields == environment_fields("cuda:0")


def test_triton_is_found_under_the_name_of_a_rocm_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "pytorch-triton-rocm":
            raise metadata.PackageNotFoundError(name)
        return "3.6.0+rocm"

    monkeypatch.setattr(metadata, "version", version)
    fields = environment_fields("cpu")
    assert (fields["triton"], fields["mla_ops"]) == ("3.6.0+rocm", None)


def test_a_device_without_rules_is_refused() -> None:
    with pytest.raises(ValueError, match="device must be"):
        environment_fields("meta")
