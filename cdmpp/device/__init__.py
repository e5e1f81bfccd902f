"""Devices: their names, what is known about them, and detection of this machine's CPU."""

from cdmpp.device.spec import DEVICE_FEATURES, GENERAL_DEVICE_FEATURES, Device, device_features
from cdmpp.device.table import DeviceTable, add_device_file, get_device, known_devices, load_table

__all__ = [
    "DEVICE_FEATURES", "GENERAL_DEVICE_FEATURES", "Device", "DeviceTable", "add_device_file", "device_features",
    "get_device", "known_devices", "load_table",
]  # fmt: skip
