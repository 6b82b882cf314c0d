"""What `ds-trainer doctor` reports, and what its exit code says."""

import pytest

from ds_trainer.cli import main
from ds_trainer.distributed import device
from ds_trainer.errors import MachineError
from ds_trainer.host import doctor


def checks():
    return {check.name: check for check in doctor.run_checks()}


def test_the_report_names_software_devices_tools_ops_and_room(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for name in ("python", "torch", "deepspeed", "transformers", "accelerate", "device", "cores"):
        assert name in shown
    for name in ("C++ compiler", "ninja", "libaio", "op cpu_adam", "op async_io", "host memory", "disk here"):
        assert name in shown


def test_a_version_outside_the_window_is_broken_and_the_exit_code_says_so(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "0.1")
    assert checks()["torch"].is_broken
    assert main(["doctor"]) == 1


@pytest.mark.case("F9")
def test_a_stale_lock_is_reported_with_the_command_that_removes_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    stale = checks()["stale lock"]
    assert stale.is_broken
    assert stale.note.endswith(f"rm {lock}")


@pytest.mark.case("E9")
def test_a_missing_tool_is_no_fault_where_nothing_is_offloaded(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiler = checks()["C++ compiler"]
    assert (compiler.ok, compiler.is_broken, compiler.value) == (False, False, "missing")
    assert "apt install g++" in compiler.note


def test_an_unknown_op_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--build-ops", "--ops", "cpu_adma"])
    assert ended.value.code == 2
    assert "cpu_adam, cpu_lion, async_io" in capsys.readouterr().err


def test_a_cpu_machine_is_described_without_a_gpu():
    machine = device.probe_machine(2, "cpu")
    assert (machine.world, machine.device, machine.native_dtypes[0]) == (2, "cpu", "fp32")
    assert "fp16" not in machine.native_dtypes


def test_cuda_on_a_machine_without_a_gpu_names_the_key(monkeypatch):
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match="run.device is cuda") as error:
        device.probe_machine(1, "cuda")
    assert "run.device" in error.value.change


@pytest.mark.parametrize(
    ("capability", "bf16", "dtypes"),
    [((5, 2), False, ("fp32",)), ((7, 5), False, ("fp32", "fp16")), ((9, 0), True, ("fp32", "fp16", "bf16"))],
)
def test_a_gpus_native_formats_follow_its_compute_capability(monkeypatch, capability, bf16, dtypes):
    cuda = device.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(cuda, "is_bf16_supported", lambda including_emulation: bf16)
    machine = device.probe_machine(1)
    assert (machine.device, machine.native_dtypes) == ("cuda", dtypes)
    assert f"compute capability {capability[0]}.{capability[1]}" in machine.reason
