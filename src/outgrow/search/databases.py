"""Open a database as a storage of Optuna, by its URL.

Its connections are tested before they are used, so that one that has been dropped is replaced, and a host that does not answer
is given up after some seconds. Several workers may create the tables at the same time: whoever loses that race tries again.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Any

from outgrow.errors import MissingError, SearchError
from outgrow.search.storage_errors import cause_of, numbers_of, said
from outgrow.text.passwords import HIDDEN, hide_passwords

CONNECT = 10  # seconds for a server to answer
SILENT = 60  # seconds after which a server that says nothing is gone: the network's own limit is a quarter of an hour
LIMITS = {
    "postgresql": {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 1000 * SILENT},
    "mysql": {"read_timeout": 2 * SILENT, "write_timeout": SILENT},  # it waits for locks for up to 50 seconds
}
TRIES = 8  # at creating the tables
DRIVERS = {  # the name in the URL, and what to install
    "postgresql": "psycopg[binary]", "postgresql+psycopg": "psycopg[binary]", "postgresql+psycopg2": "psycopg2-binary",
    "mysql": "mysqlclient, or write mysql+pymysql://… and pip install PyMySQL", "mysql+pymysql": "PyMySQL",
    "mariadb": "mysqlclient, or write mariadb+pymysql://… and pip install PyMySQL", "mariadb+pymysql": "PyMySQL",
}  # fmt: skip
LOGGERS = ("optuna.storages._rdb.storage", "sqlalchemy.pool.impl.QueuePool")
EXISTS = ("42P07", "42710", "42701")  # SQLSTATE: a table, an object, a column is already there
EXISTS_NUMBERS = (1050, 1061, 1213)  # MySQL: a table, a key is already there; a deadlock


def open_database(name: str, create: bool = True) -> Any:
    """Optuna's storage in the database of a URL; create: make the tables if it has none."""
    url = _url_of(name)
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.drivername in DRIVERS:
        limits = LIMITS[url.drivername.partition("+")[0].replace("mariadb", "mysql")]
        known = {"connect_timeout": CONNECT, **limits}
        options["connect_args"] = {name: value for name, value in known.items() if name not in url.query}
    try:
        return _opened(name, options, None if create else url)
    except ImportError as error:
        package = DRIVERS.get(url.drivername, f"the driver of {url.drivername}")
        raise MissingError(
            f"the storage {shown(name)} needs a driver for its database: pip install {package} ({error.__cause__ or error})"
        ) from error
    except RuntimeError as error:
        if "schema" not in str(error):
            raise
        raise SearchError(
            f"the storage {shown(name)} was set up by another version of Optuna: {str(error).strip()} The study is as it was"
        ) from error


def is_server(name: str) -> bool:
    """Whether a URL is that of a server."""
    return name.partition("://")[0] in DRIVERS


def shown(name: str) -> str:
    """The name of a storage without passwords."""
    return hide_passwords(name)


def without_secrets(text: str, name: str) -> str:
    """A text in which the passwords of a URL don't occur."""
    from sqlalchemy.engine import make_url

    try:
        url = make_url(name)
    except Exception:
        return hide_passwords(text)
    secrets = {str(url.password or ""), *(str(value) for key, value in url.query.items() if "passw" in key)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN) if len(secret) > 3 else text
    return hide_passwords(text)


def _url_of(name: str) -> Any:
    """The parsed URL; an error without the parts that it was taken apart into, which may be pieces of a password."""
    from sqlalchemy.engine import make_url

    kind = name.partition("://")[0]
    try:
        url = make_url(name)
        readable = kind.startswith("sqlite") or name.count("@") < 2
    except Exception:
        readable = False
    if not readable:
        raise SearchError(
            f"the URL of the storage, {kind}://…, can't be read: write {kind}://USER:PASSWORD@HOST:PORT/DATABASE, and letters "
            "like @ : / ? # % of the password as urllib.parse.quote_plus writes them"
        ) from None
    return url


def _opened(name: str, options: dict[str, Any], checked: Any) -> Any:
    """checked: a URL of the same database, which must have tables."""
    import optuna
    from sqlalchemy.exc import DBAPIError

    for logger in LOGGERS:
        logging.getLogger(logger).addFilter(_is_needed)
    login, at, rest = name.rpartition("@")
    name = login.replace("{", "%7B").replace("}", "%7D") + at + rest  # Optuna takes the name as a format
    for attempt in range(TRIES):
        try:
            if checked is not None:
                _check_tables(checked, options)
            return optuna.storages.get_storage(optuna.storages.RDBStorage(name, engine_kwargs=dict(options)))
        except (DBAPIError, optuna.exceptions.StorageInternalError) as error:
            found: Any = cause_of(error)
            if attempt == TRIES - 1 or not (_exists_already(found) or getattr(found, "connection_invalidated", False)):
                raise
            time.sleep(random.uniform(0.1, 0.5))
    raise AssertionError("unreachable")


def _is_needed(entry: logging.LogRecord) -> bool:
    """Leave out SQL statements and tracebacks that are printed when a connection breaks: the error itself is reported."""
    return not str(entry.msg).startswith(("Caught an error from sqlalchemy", "Exception during reset", "Exception terminating"))


def _exists_already(error: Any) -> bool:
    """Whether another process has created a table, or its first entry, at the same time."""
    from sqlalchemy.exc import IntegrityError

    number, state = numbers_of(error)
    return isinstance(error, IntegrityError) or number in EXISTS_NUMBERS or state in EXISTS or "already exists" in said(error)


def _check_tables(url: Any, options: dict[str, Any]) -> None:
    """Raise if the database has no tables of Optuna, before they would be created."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(url, **options)
    try:
        if not sqlalchemy.inspect(engine).has_table("studies"):
            raise SearchError("the storage holds no study")
    finally:
        engine.dispose()
