"""The table of known devices: the one that ships, and what users add."""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cdmpp.device.build import ISAS, build_device
from cdmpp.device.detect import ROOT_VARIABLE, cpu_row, detect_gpu_names, read_cpu_facts
from cdmpp.device.plausible import check_plausible
from cdmpp.device.spec import Device, identity_differences
from cdmpp.errors import UnknownDeviceError

if TYPE_CHECKING:
    from cdmpp.device.row import DeviceRow

#: Environment variable: YAML files of devices, separated by ``:``.
DEVICES_VARIABLE = "CDMPP_DEVICES"

#: The name that stands for the CPU at hand.
THIS_CPU = "this-cpu"

_SHIPPED = Path(__file__).with_name("table.yaml")


class DeviceTable:
    """Rows by name and alias.

    Parameters
    ----------
    rows
        A later row of the same name and kind changes the fields that it gives.
    this_cpu
        The CPU at hand as detected, known as ``this-cpu``. Where a row describes it, it has that row's name and facts, of
        which it changes none; else it becomes a row of its own.
    """

    def __init__(self, rows: Iterable[DeviceRow], this_cpu: DeviceRow | None = None) -> None:
        self._rows: dict[str, DeviceRow] = {}
        self._keys: dict[str, str] = {}
        for row in rows:
            known = self._rows.get(row.name)
            self._add(row if known is None or known.kind != row.kind else overlay(known, row))
        self.this_cpu: DeviceRow | None = None
        self._cores_here: int | None = None
        if this_cpu is not None:
            self.this_cpu = self._recognised(this_cpu) or self._named(this_cpu)
            self._cores_here = this_cpu.cores
            self._rows[self.this_cpu.name] = self.this_cpu
            for name in (THIS_CPU, self.this_cpu.name, *self.this_cpu.aliases):
                self._keys[normalise(name)] = self.this_cpu.name

    def _add(self, row: DeviceRow) -> None:
        self._rows[row.name] = row
        for name in (row.model, *row.aliases, row.name):
            if name:
                self._keys[normalise(name)] = row.name

    def _recognised(self, here: DeviceRow) -> DeviceRow | None:
        """The row of the CPU at hand: of its product, or of its kind (``epyc-zen4-...``), and only where all that makes a
        CPU what it is agrees. A model string decides nothing: hypervisors call a Zen 3 and a Zen 4 "AMD EPYC"."""
        product = self._rows.get(self._keys.get(normalise(here.model), ""))
        of_kind = [row for row in self._rows.values() if _kind_of_cpu(row.name) == _kind_of_cpu(here.name)]
        candidates = [row for row in (product, *of_kind) if row is not None and row.kind == "cpu"]
        found = next((row for row in candidates if not _row_differences(row, here)), None)
        # A user's row may hold no more than what was measured of this machine.
        return overlay(here, found) if found is not None and not found.arch else found

    def _named(self, here: DeviceRow) -> DeviceRow:
        """The detected row, under a name that no other CPU of the table has."""
        known = self._rows.get(here.name)
        if known is None:
            return here
        differing = [name.split()[0] for name in _row_differences(known, here)]
        told = [f"{name.partition('_')[0]}-{getattr(here, _FIELDS.get(name, name))}" for name in differing]
        return here.model_copy(update={"name": normalise("-".join((here.name, *told))).replace(".0", "")})

    @property
    def rows(self) -> list[DeviceRow]:
        """All rows, in the order of their names."""
        return [self._rows[name] for name in sorted(self._rows)]

    def get(self, name: str) -> Device:
        """The device of a name ``base[.isa][@share]``.

        ``base`` is a name, a model string or an alias, in any case, with spaces, ``_`` or ``-``. ``isa`` is
        one of :data:`cdmpp.device.build.ISAS`. ``share`` is a number of cores of a CPU or a fraction of a
        GPU.

        Raises
        ------
        UnknownDeviceError
            No such device (the message suggests near names), share or instruction set.
        """
        base, at, share_text = name.partition("@")
        share = None
        if at:
            try:
                share = float(share_text)
            except ValueError:
                raise UnknownDeviceError(f"{name!r}: after @ comes a share, such as @1 or @0.5") from None
        row = self._find(base)
        isa = ""
        if row is None:
            for candidate in ISAS:
                if normalise(base).endswith(f".{candidate}"):
                    isa = candidate
                    row = self._find(normalise(base)[: -len(candidate) - 1])
        if row is None:
            raise UnknownDeviceError(
                f"unknown device {name!r}{self._suggest(base)}; `cdmpp devices` lists all"
            )
        here = normalise(base).startswith(THIS_CPU)
        return build_device(row, share, isa, cores_here=self._cores_here if here else None)

    def _find(self, base: str) -> DeviceRow | None:
        key = self._keys.get(normalise(base))
        return None if key is None else self._rows[key]

    def _suggest(self, base: str) -> str:
        near = difflib.get_close_matches(normalise(base), list(self._keys), n=6, cutoff=0.5)
        names = list(dict.fromkeys(THIS_CPU if key == THIS_CPU else self._keys[key] for key in near))[:3]
        return f"; did you mean {' or '.join(names)}?" if names else ""


#: Names in :func:`~cdmpp.device.spec.identity_differences` -> field of a row.
_FIELDS = {"code": "mcpu"}


def _row_differences(row: DeviceRow, here: DeviceRow) -> list[str]:
    return identity_differences(*({**vars(r), "code": r.mcpu} for r in (row, here)))


def _kind_of_cpu(name: str) -> str:
    """``epyc-zen4-2.6ghz`` -> ``epyc-zen4``: brand and microarchitecture, without clock and what follows."""
    return re.split(r"-[\d.]+ghz", name)[0]


def normalise(name: str) -> str:
    """A name without case, marks and kinds of separator: ``AMD_Instinct MI100`` -> ``amd-instinct-mi100``."""
    plain = re.sub(r"\((r|tm|c)\)", " ", name.lower())
    return re.sub(r"[\s_/-]+", "-", plain).strip("-")


def read_device_file(path: str | Path) -> list[DeviceRow]:
    """The rows of a YAML file: a list of mappings, or one mapping.

    Raises
    ------
    UnknownDeviceError
        The file cannot be read, or a field is wrong or implausible: the message names the row and the field.
    """
    import yaml
    from pydantic import ValidationError

    from cdmpp.device.row import DeviceRow

    path = Path(path)
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is ten times as fast
        content = yaml.load(path.read_text(encoding="utf-8"), loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UnknownDeviceError(
            f"cannot read devices from {path}: {' '.join(str(error).split())}"
        ) from error
    rows = []
    for number, item in enumerate([content] if isinstance(content, dict) else content or [], start=1):
        who = item.get("name", f"row {number}") if isinstance(item, dict) else f"row {number}"
        try:
            rows.append(DeviceRow.model_validate(item))
        except ValidationError as error:
            wrong = "; ".join(_explain(dict(detail)) for detail in error.errors())
            raise UnknownDeviceError(f"{path}: {who}: {wrong}") from error
        check_plausible(rows[-1], str(path))
    if not rows:
        raise UnknownDeviceError(f"{path} holds no device")
    return rows


def _explain(detail: dict[str, object]) -> str:
    from cdmpp.device.row import DeviceRow

    place = detail.get("loc")
    field = ".".join(str(part) for part in place) if isinstance(place, tuple) else ""
    if detail.get("type") == "extra_forbidden":
        near = difflib.get_close_matches(field, list(DeviceRow.model_fields), n=1, cutoff=0.6)
        return f"there is no field {field}" + (f"; did you mean {near[0]}?" if near else "")
    return f"{field or 'row'}: {detail.get('msg')} (got {detail.get('input')!r})"


@functools.cache
def _shipped_rows() -> tuple[DeviceRow, ...]:
    return tuple(read_device_file(_SHIPPED))


@functools.cache
def _this_cpu(root: str) -> DeviceRow:
    return cpu_row(read_cpu_facts(Path(root)))


def load_table(extra: Sequence[str | Path] = (), this_machine: bool = True) -> DeviceTable:
    """The shipped rows, the user's files and this machine's CPU (unless it is not asked for).

    User's files are ``~/.config/cdmpp/devices.yaml`` (see :func:`add_device_file`), those of the environment
    variable ``CDMPP_DEVICES``, and ``extra``; later ones win.

    Raises
    ------
    UnknownDeviceError
        A file cannot be read or has a wrong field.
    """
    configured = [Path(p) for p in os.environ.get(DEVICES_VARIABLE, "").split(os.pathsep) if p]
    home = [user_file()] if user_file().exists() else []
    own = [row for path in (*home, *configured, *map(Path, extra)) for row in read_device_file(path)]
    root = os.environ.get(ROOT_VARIABLE) or "/"
    return DeviceTable([*_shipped_rows(), *own], _this_cpu(root) if this_machine else None)


def user_file() -> Path:
    """Where a user's own devices are kept: ``~/.config/cdmpp/devices.yaml``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "cdmpp" / "devices.yaml"


def add_device_file(path: str | Path) -> list[str]:
    """Make the devices of a YAML file known for good, by adding them to :func:`user_file`.

    Returns
    -------
    Their names.

    Raises
    ------
    UnknownDeviceError
        The file cannot be read or has a wrong field, or the user's file cannot be written.
    """
    import yaml

    target = user_file()
    known = {row.name: row for row in read_device_file(target)} if target.exists() else {}
    added = read_device_file(path)
    for row in added:
        known[row.name] = overlay(known[row.name], row) if row.name in known else row
    content = [row.model_dump(mode="json", exclude_unset=True) for row in known.values()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_suffix(".tmp")
        draft.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        raise UnknownDeviceError(f"cannot write {target}: {error.strerror}") from error
    return [row.name for row in added]


def overlay(known: DeviceRow, row: DeviceRow) -> DeviceRow:
    """The known row with the fields that the other one gives; their aliases together.

    Raises
    ------
    UnknownDeviceError
        Together they are implausible.
    """
    given = row.model_dump(exclude_unset=True)
    aliases = tuple(dict.fromkeys((*known.aliases, *row.aliases)))
    united = type(known)(**{**known.model_dump(exclude_unset=True), **given, "aliases": aliases})
    check_plausible(united)
    return united


def get_device(name: str, table: DeviceTable | None = None) -> Device:
    """The device of a name such as ``this-cpu@1``, ``this-cpu.x86-64-v2@1``, ``h200`` or ``h200@0.5``.

    See :meth:`DeviceTable.get`; without a table, :func:`load_table` says which devices there are.
    """
    return (table or load_table()).get(name)


def detect() -> Device:
    """The CPU of this machine with all cores that this process may use."""
    return get_device(THIS_CPU)


def detect_gpus() -> list[Device]:
    """The GPUs of this machine that the table knows, as ``nvidia-smi`` lists them."""
    table = load_table()
    found = []
    for name in detect_gpu_names():
        try:
            found.append(table.get(name))
        except UnknownDeviceError:
            continue
    return found


def known_devices(table: DeviceTable | None = None) -> list[Device]:
    """Every device of the table with all its cores, GPUs first, each in the order of names."""
    rows = (table or load_table()).rows
    return [build_device(row) for row in sorted(rows, key=lambda row: (row.kind != "gpu", row.name))]
