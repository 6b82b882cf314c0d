"""torch's DeviceMesh over the ranks of the process group that exists already."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ds_trainer.distributed.process_groups import Mesh


def device_mesh(mesh: Mesh, axes: Mapping[str, int]) -> DeviceMesh:
    """Arranges the data-parallel ranks along named axes; neighbouring data-parallel ranks differ in the last one.

    The mesh is a submesh of one with two more axes: `pp`, the outermost, and `tp`, the innermost.

    Args:
        mesh: Process groups and device.
        axes: Name -> size, outermost first.

    Example:
        `{"dp_replicate": 2, "dp_shard": 2}` on 4 ranks: ranks 0 and 1 share one replica of the model, 2 and 3 another.

    Comm: with more than one axis, a new process group for each row and column.
    """
    if mesh.grid.model_size == 1:
        return init_device_mesh(mesh.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    sizes = (mesh.grid.pp_size, *axes.values(), mesh.grid.tp_size)
    return init_device_mesh(mesh.device.type, sizes, mesh_dim_names=("pp", *axes, "tp"))[tuple(axes)]
