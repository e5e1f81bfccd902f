"""What devices cost: a user's file of prices."""

from __future__ import annotations

import math
from pathlib import Path

from cdmpp.errors import PriceError, UnknownDeviceError


def read_prices(path: str | Path) -> dict[str, float]:
    """Canonical device name -> price of an hour, in the user's currency.

    Parameters
    ----------
    path
        YAML or JSON: a mapping of device names, with their share where it is not the whole device, to prices.

    Raises
    ------
    PriceError
        The file cannot be read, is no such mapping, or a price is not positive and finite, or is given twice.
    UnknownDeviceError
        A name is not a device's.
    """
    import yaml

    from cdmpp.device import get_device, load_table

    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
        raise PriceError(f"cannot read prices from {path}: {' '.join(str(err).split())}") from err
    if not isinstance(content, dict) or not content:
        raise PriceError(f"{path}: expected device names and prices of an hour, such as 'h200: 4.5'")
    table = load_table()
    prices: dict[str, float] = {}
    for name, price in content.items():
        try:
            device = get_device(str(name), table).name
        except UnknownDeviceError as err:
            raise UnknownDeviceError(f"{path}: {err}") from err
        number = not isinstance(price, bool) and isinstance(price, int | float)
        if not number or not math.isfinite(price) or price <= 0:
            raise PriceError(f"{path}: the price of {name} must be a positive number, not {price!r}")
        if device in prices:
            raise PriceError(f"{path}: two prices of {device}")
        prices[device] = float(price)
    return prices
