"""Disk and memory checks before a model is loaded."""

import shutil
from collections import namedtuple

import pytest

from ds_trainer.config.resolved import Machine, ModelSize, ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import MachineError
from ds_trainer.host import preflight
from ds_trainer.host.host_memory import cgroup_available_bytes
from ds_trainer.launch.rank_grid import Grid

Usage = namedtuple("Usage", "total used free")


def resolved(tmp_path, stage=3, dtype="fp32", device="cpu", ranks=2, bucket=1000, elements=1000, **zero):
    config = {
        "zero": {"stage": stage, "reduce_bucket_size": bucket, "overlap_comm": False, **zero},
        "precision": {"dtype": dtype, "grad_dtype": "fp32", "communication_data_type": "fp32"},
        "batch": {"accumulation": 1},
        "run": {"output_dir": str(tmp_path / "out")},
    }
    machine = Machine(ranks, device)
    return ResolvedConfig(RunConfig.model_validate(config), machine, ranks, "deepspeed_cpu", ModelSize(elements))


def on_nvme(path):
    return {"device": "nvme", "nvme_path": str(path), "buffer_count": 4}


@pytest.fixture
def free_memory(monkeypatch):
    """Sets how much host memory is free."""
    return lambda size: monkeypatch.setattr(preflight, "available_bytes", lambda: (size, "a limit"))


@pytest.fixture
def free_disk(monkeypatch):
    """Sets how much disk is free."""
    return lambda size: monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(size, 0, size))


@pytest.mark.case("E5")
def test_too_little_host_memory_names_what_is_needed_and_what_is_free(tmp_path, free_memory):
    run = resolved(tmp_path, stage=2, elements=200_000_000, offload_optimizer={"device": "cpu"})
    free_memory(1_500_000_000)
    with pytest.raises(MachineError, match=r"needs about 5\.6 GB of host memory, 1\.5 GB free \(a limit\)") as error:
        preflight.check_resources(run, 200_000_000, Grid(2, 0, 0, 2))
    assert "fp32 masters 0.8 GB" in error.value.rule
    free_memory(5_700_000_000)
    preflight.check_resources(run, 200_000_000, Grid(2, 0, 0, 2))


@pytest.mark.case("E5")
def test_with_a_gpu_only_what_is_offloaded_counts_as_host_memory(tmp_path):
    def size(**zero):
        run = resolved(tmp_path, stage=3, device="cuda", **zero)
        return sum(part.size for part in preflight.host_parts(run))

    assert size() == 0
    assert size(offload_optimizer={"device": "cpu"}) == 1000 * (4 + 8 + 4 + 4) / 2
    assert size(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}) == 1000 * 24 / 2


def test_buckets_and_swap_buffers_are_counted(tmp_path):
    run = resolved(
        tmp_path,
        bucket=7000,
        sub_group_size=300,
        stage3_prefetch_bucket_size=50,
        offload_optimizer=on_nvme(tmp_path),
        offload_param={**on_nvme(tmp_path), "buffer_count": 5, "buffer_size": 20},
    )
    sizes = {part.name: part.size for part in preflight.host_parts(run)}
    assert sizes["reduce buckets"] == 7000 * 4
    assert sizes["prefetched parameters"] == 50 * 4
    assert sizes["optimizer swap buffers"] == 4 * 300 * 4
    assert sizes["parameter swap buffers"] == (5 * 20 + 300) * 4


@pytest.mark.case("E6")
def test_swap_files_that_do_not_fit_are_refused(tmp_path, free_disk, free_memory):
    drive = tmp_path / "drive"
    free_memory(10**12)
    run = resolved(tmp_path, elements=10**8, offload_optimizer=on_nvme(drive), offload_param=on_nvme(drive))
    # Masters, moments, gradients and parameters: 20 bytes over 2 ranks, both on this machine.
    free_disk(20 * 10**8 - 1)
    with pytest.raises(MachineError, match=r"swap files of 2 rank\(s\): needs about 2\.0 GB"):
        preflight.check_resources(run, 10**8, Grid(2, 0, 0, 2))
    free_disk(20 * 10**8)
    preflight.check_resources(run, 10**8, Grid(2, 0, 0, 2))


@pytest.mark.case("E6")
def test_a_swap_path_must_be_a_folder_that_can_be_written(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(MachineError, match="zero.offload_optimizer.nvme_path") as error:
        preflight.check_swap_path(file, "zero.offload_optimizer.nvme_path")
    assert "File exists" in error.value.found
    with pytest.raises(MachineError, match="No such file or directory"):
        preflight.check_swap_path(tmp_path / "missing" / "swap", "zero.offload_optimizer.nvme_path")
    preflight.check_swap_path(tmp_path / "swap", "zero.offload_optimizer.nvme_path")
    assert list((tmp_path / "swap").iterdir()) == []


@pytest.mark.case("E6")
def test_a_read_only_swap_path_is_refused():
    with pytest.raises(MachineError, match="zero.offload_param.nvme_path"):
        preflight.check_swap_path(preflight.Path("/proc"), "zero.offload_param.nvme_path")


@pytest.mark.case("E6")
def test_a_file_system_without_direct_io_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "has_direct_io", lambda folder: False)
    with pytest.raises(MachineError, match="O_DIRECT"):
        preflight.check_swap_path(tmp_path, "zero.offload_param.nvme_path")


def test_only_the_first_rank_of_a_machine_checks_what_ranks_share(tmp_path, free_memory):
    free_memory(0)
    preflight.check_resources(resolved(tmp_path), 1000, Grid(2, 1, 1, 2))
    assert not (tmp_path / "out").exists()


def test_an_output_folder_must_be_writable_and_have_room_for_the_export(tmp_path, free_disk):
    run = resolved(tmp_path)
    needed = 2 * 1000 + int(preflight._BESIDE_WEIGHTS)
    free_disk(needed - 1)
    with pytest.raises(MachineError, match="exported model"):
        preflight.check_output_dir(run, 1000)
    free_disk(needed)
    preflight.check_output_dir(run, 1000)
    (tmp_path / "blocked").touch()
    with pytest.raises(MachineError, match="run.output_dir"):
        preflight.check_output_dir(resolved(tmp_path / "blocked"), 1000)


def group(folder, names, limit, usage, cache):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip((*names, "memory.stat"), (limit, usage, cache), strict=True):
        (folder / name).write_text(f"{value}\n")


@pytest.mark.case("E5")
def test_the_tightest_limit_of_the_control_groups_counts(tmp_path):
    names = ("memory.max", "memory.current")
    group(tmp_path / "a", names, 1000, 300, "anon 200\ninactive_file 100")
    group(tmp_path / "a" / "b", names, "max", 50, "inactive_file 0")
    membership = tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    assert cgroup_available_bytes(tmp_path, membership) == 800
    membership.write_text("0::/\n")
    assert cgroup_available_bytes(tmp_path, membership) is None


@pytest.mark.case("E5")
def test_version_1_control_groups_are_read_too(tmp_path):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    group(tmp_path / "memory" / "job", names, 5000, 1500, "inactive_file 9\ntotal_inactive_file 500")
    group(tmp_path / "memory", names, 2**63 - 4096, 10**9, "total_inactive_file 0")
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/job\n0::/\n")
    assert cgroup_available_bytes(tmp_path, membership) == 4000
