"""Which device a label is of: the specification that is stored beside the records, on any machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cdmpp.device import Device, load_table
from cdmpp.errors import DatasetError, UnknownDeviceError


def stored_devices(meta: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, Device]:
    """The specifications of a dataset's devices, by name.

    ``meta`` are the contents of its ``meta.json``, ``names`` the devices that it has records of, ``where`` its path. A device
    that ``meta`` does not describe (imported measurements) is taken from the device table, never from the machine at hand.
    DatasetError: a device is described neither there nor in the table, or otherwise than in the table.
    """
    table = load_table(this_machine=False)
    described = meta.get("devices", {})
    if not isinstance(described, dict) or not all(isinstance(spec, dict) for spec in described.values()):
        raise DatasetError(f"{where}/meta.json: expected a specification for each name under 'devices'")
    found = {}
    for name in sorted({*names, *described}):
        try:
            known = table.get(name)
        except UnknownDeviceError:
            known = None
        if name in described:
            try:
                found[name] = Device.from_json({**described[name], "name": name})
            except TypeError as error:
                raise DatasetError(f"{where}/meta.json: device {name} is incomplete: {error}") from error
            if known is not None:
                check_same(found[name], known, where, "the device table")
        elif known is not None:
            found[name] = known
        else:
            raise DatasetError(
                f"{where}/meta.json does not describe {name}, of which there are records, and it is in no device table"
            )
    return found


def check_same(one: Device, other: Device, where: str, other_where: str) -> None:
    """DatasetError unless two specifications under one name are of one device; it names both places and the facts."""
    differences = one.differences(other)
    if differences:
        raise DatasetError(
            f"{one.name} is not the same device in {where} and in {other_where}: {', '.join(differences)}"
        )


def unite_devices(parts: Mapping[str, Mapping[str, Device]]) -> dict[str, Device]:
    """The devices of several datasets (path -> name -> device); DatasetError as :func:`check_same` raises."""
    found: dict[str, Device] = {}
    first: dict[str, str] = {}
    for where, devices in parts.items():
        for name, device in devices.items():
            if name in found:
                check_same(found[name], device, first[name], where)
            else:
                found[name], first[name] = device, where
    return found
