"""A mesh of devices where a process group is asked for."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ithaca.errors import InvalidInputError


def process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """``group``, or the group of a mesh of one dimension, such as ``mesh["ulysses"]``."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise InvalidInputError(
            f"a group was required to be a mesh of one dimension, such as mesh[NAME]; received one of {group.ndim}, "
            f"{group.mesh_dim_names or 'without names'}"
        )
    return group.get_group()
