"""Errors of storages: what they say, without passwords, and whether they pass when a server is back or a lock is released.

Optuna hides the errors of a database behind its own `StorageInternalError`, and those of a proxy come from gRPC. Databases
number their errors: PostgreSQL by SQLSTATE (its first two characters are the class), MySQL and MariaDB by a number.
"""

from __future__ import annotations

from typing import Any

from outgrow.errors import SearchError
from outgrow.text.passwords import hide_passwords

LIBRARIES = ("sqlalchemy", "grpc", "sqlite3")
# classes of SQLSTATE: connection lost, transaction rolled back by a deadlock, no more resources, lock not available, shut down
PASSING_STATES = ("08", "40", "53", "55", "57")
# of MySQL and MariaDB: too many connections, shut down, network, lock and deadlock, connection killed, lost or refused
PASSING_NUMBERS = {1040, 1053, 1077, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1205, 1213, 1927, 2002, 2003, 2006, 2013, 2055}
OPTUNA = "An exception is raised during the commit"  # Optuna's words for all errors of databases
PASSING_CODES = ("UNAVAILABLE", "UNKNOWN", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL")  # UNKNOWN: of the database behind it


class UnreachableError(SearchError):
    """The storage could not be reached for too long. The trials of this worker are taken up again later."""


def is_of_storage(error: BaseException) -> bool:
    """Whether an error comes from a storage, and not from the code of a search."""
    from optuna.exceptions import StorageInternalError

    return isinstance(error, (OSError, StorageInternalError)) or type(error).__module__.partition(".")[0] in LIBRARIES


def cause_of(error: BaseException) -> BaseException:
    """The error of the database behind Optuna's."""
    from optuna.exceptions import StorageInternalError

    return error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ is not None else error


def passes(error: BaseException) -> bool:
    """Whether the same call may succeed later, since a connection, a server or a lock is what failed."""
    error = cause_of(error)
    library = type(error).__module__.partition(".")[0]
    if library == "grpc":
        return getattr(getattr(error, "code", lambda: None)(), "name", "") in PASSING_CODES
    if library != "sqlalchemy":
        return False
    import sqlalchemy.exc as kinds

    if isinstance(error, (kinds.PendingRollbackError, kinds.ResourceClosedError, kinds.TimeoutError, kinds.DisconnectionError)):
        return True
    if not isinstance(error, kinds.DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    number, state = numbers_of(error)
    if number is not None:
        return number in PASSING_NUMBERS
    if state:
        return state.startswith(PASSING_STATES)
    if type(error.orig).__module__ == "sqlite3":
        return "locked" in str(error.orig)
    return isinstance(error, (kinds.OperationalError, kinds.InterfaceError))


def is_refused(error: BaseException) -> bool:
    """Whether a database answers, but does not carry out what is asked, e.g. since its user may only read."""
    error = cause_of(error)
    if type(error).__module__.partition(".")[0] != "sqlalchemy":
        return False
    from sqlalchemy.exc import DBAPIError

    missing = "unable to open database file" in str(error)  # SQLite's
    return isinstance(error, DBAPIError) and not passes(error) and not missing


def numbers_of(error: Any) -> tuple[int | None, str]:
    """The number (MySQL) and the state (PostgreSQL) of an error of SQLAlchemy."""
    original = getattr(error, "orig", None)
    first = next(iter(getattr(original, "args", ())), None)
    state = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None) or ""
    return (first if isinstance(first, int) else None), state


def said(error: BaseException) -> str:
    """An error in one line, without passwords: that of the database, not of the libraries in front of it."""
    error = cause_of(error)
    library = type(error).__module__.partition(".")[0]
    if library == "grpc" and hasattr(error, "details"):
        code, details = error.code().name, _first_line(error.details())  # type: ignore[attr-defined]
        behind = "the database behind the proxy fails, and the output of the proxy has the reason"
        return hide_passwords(f"{code}: {behind if code == 'UNKNOWN' and OPTUNA in details else details}")
    original: Any = getattr(error, "orig", None) or error
    number, _ = numbers_of(error)
    text = str(original.args[1]) if number is not None and len(original.args) > 1 else str(original)
    return hide_passwords(f"{type(original).__name__}: {_first_line(text)}".removesuffix(": "))


def _first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0].rstrip()
