"""Typed exceptions and the failure kinds of a record.

Every error a user can cause derives from :class:`CdmppError`; the command line prints its message on one
line and exits with code 2. A failed measurement is not an exception but a record with one of
:data:`FAILURE_KINDS` as its status.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

#: Why a program has no latency. These are data: they train the validity model.
FAILURE_KINDS: tuple[str, ...] = (
    "build_error", "build_timeout", "run_error", "run_timeout", "device_lost", "invalid_config",
)  # fmt: skip

#: Every status a record may have.
STATUSES: tuple[str, ...] = ("ok", *FAILURE_KINDS)


class CdmppError(Exception):
    """Base of all errors that cdmpp raises on purpose."""


class NetworkError(CdmppError):
    """A network cannot be found, read or imported."""


class UnsupportedOpError(NetworkError):
    """A network uses an operator that TVM cannot import; the message names it."""


class ProgramError(CdmppError):
    """A program cannot be rebuilt, parsed or encoded."""


class UnknownDeviceError(CdmppError):
    """A device name is in no table; the message suggests similar names."""


class DatasetError(CdmppError):
    """A dataset is missing, unreadable or cannot be written."""


class SchemaVersionError(DatasetError):
    """A dataset was written with another schema version."""


class SplitError(DatasetError):
    """A split is empty, malformed or not disjoint."""


class LabelError(CdmppError):
    """A latency is NaN, infinite, zero or negative."""


class PredictorError(CdmppError):
    """A predictor cannot be loaded, trained or used."""


class FeatureMismatchError(PredictorError):
    """Features were made with another feature set than the expected one."""


class ProfilerError(CdmppError):
    """Measuring cannot start or go on."""


class BundleError(ProfilerError):
    """A bundle is missing, damaged, of another version, or cannot be written."""


class TunerError(CdmppError):
    """Tuning cannot start or go on."""


class PriceError(CdmppError):
    """Prices of devices cannot be read."""


def reason(error: Exception) -> str:
    """The message of an error in one line; for an OSError without the path, which our own message already names."""
    missing = "no such file" * isinstance(error, FileNotFoundError)  # pyarrow's has nothing but the path
    return getattr(error, "strerror", None) or missing or " ".join(str(error).split())


def check_above_0(error: type[CdmppError], values: Mapping[str, Any]) -> None:
    """Raise ``error`` if one of these settings (by name) is a number that is not above 0."""
    for name, value in values.items():
        if isinstance(value, int | float) and not value > 0:
            raise error(f"{name} is {value:g}, expected a number above 0")


@contextmanager
def raised_as(error: type[CdmppError], sentence: str, *more: type[Exception]) -> Iterator[None]:
    """Turn OSError, ValueError and ``more``, which files and their content raise, into ``error``: the sentence, then why."""
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, *more)
    try:
        yield
    except kinds as err:
        raise error(f"{sentence}: {reason(err)}") from err
