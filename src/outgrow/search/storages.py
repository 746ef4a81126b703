"""Open the storage and the study of a search; Optuna is imported here, and only when a search needs it.

A storage is named by a path (a journal file, which several processes and machines may share), by the URL of a database
(`sqlite:///search.db`, `postgresql://…`) or of Optuna's proxy (`grpc://host:13000`), or is an object of Optuna.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

from outgrow.errors import MissingError, SearchError
from outgrow.search.databases import is_server, open_database, shown, without_secrets
from outgrow.search.objectives import Objectives
from outgrow.search.patience import Patient
from outgrow.search.storage_errors import is_of_storage, is_refused, said

PROXY = "grpc://"
WAIT = 10.0  # seconds for a proxy to answer
FACTS = "outgrow"  # the study's attribute that describes the search
VERSION = 1
UNREACHABLE = (
    "the storage {} can't be reached ({}): check that it exists and runs; a storage is a journal file, e.g. search.log, a "
    "database, e.g. sqlite:///search.db or postgresql://…, or a proxy, grpc://HOST:PORT"
)
UNANSWERED = "the storage {} can't be reached ({}): check its URL and that the server lets its user in. The study is as it was"
DAMAGED = "the storage is no journal file of Optuna, or it is damaged ({})"


def optuna() -> Any:
    """The library, which is imported only when a search needs it."""
    try:
        import optuna as library
    except ImportError as error:
        raise MissingError(f"a search needs Optuna: pip install outgrow[search] ({error})") from error
    return library


class FileLock:
    """The lock of a journal file, which the system releases when its process dies.

    Optuna's own locks are files: a worker that is killed while it writes leaves one behind, and all others wait for half a
    minute. Whoever gets the lock also removes an unfinished last line, which only a dead process can have left.
    """

    def __init__(self, path: str) -> None:
        self._path, self._file = path, -1

    def acquire(self) -> bool:
        import fcntl

        self._file = os.open(f"{self._path}.flock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            _cut_unfinished(self._path)
        except BaseException:  # for instance, the journal was removed: no other worker may wait for this one
            self.release()
            raise
        return True

    def release(self) -> None:
        os.close(self._file)


def _cut_unfinished(path: str) -> None:
    """Remove what follows the last line feed of a file."""
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        if not end:
            return
        file.seek(end - 1)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        kept = file.read().rfind(b"\n") + 1
        file.truncate(kept)


def open_storage(storage: Any, create: bool = True) -> Any:
    """A storage object of Optuna; SearchError if it can't be reached. None is a storage in memory.

    create: make the tables of a database that has none. Databases and proxies are patient (`patience`).
    """
    library = optuna()
    if storage is None:
        return library.storages.InMemoryStorage()
    if not isinstance(storage, (str, os.PathLike)):
        check_kind(storage)
        return patient(storage)
    name = os.fspath(storage)
    try:
        if name.startswith(PROXY):
            return Patient(_proxy(name))
        if "://" in name:
            return Patient(open_database(name, create))
    except (SearchError, MissingError):
        raise
    except Exception as error:
        text = UNANSWERED if is_server(name) else UNREACHABLE
        raise SearchError(text.format(shown(name), without_secrets(said(error), name))) from error
    try:
        return _journal(name)
    except (json.JSONDecodeError, LookupError, TypeError) as error:
        raise SearchError(DAMAGED.format(f"{type(error).__name__}: {error}")) from error
    except Exception as error:
        raise SearchError(UNREACHABLE.format(name, said(error))) from error


def patient(storage: Any) -> Any:
    """A storage object of Optuna; one of a server waits while it can't be reached."""
    library = optuna()
    servers = (library.storages.RDBStorage, library.storages.GrpcStorageProxy, library.storages._CachedStorage)
    return Patient(library.storages.get_storage(storage)) if isinstance(storage, servers) else storage


def check_kind(storage: Any) -> None:
    """Raise if a storage is neither named nor an object of Optuna."""
    known = storage is None or isinstance(storage, (str, os.PathLike)) or hasattr(storage, "create_new_study")
    if not known:
        raise SearchError(
            f"storage is of type {type(storage).__name__}: write a path, e.g. 'search.log', a URL, or a storage of Optuna"
        )


def _journal(path: str) -> Any:
    journal = optuna().storages.journal
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder}")
    _check_journal(path)
    try:
        import fcntl  # noqa: F401
    except ImportError:  # not on Windows
        return journal.JournalStorage(journal.JournalFileBackend(path, journal.JournalFileOpenLock(path)))
    return journal.JournalStorage(journal.JournalFileBackend(path, FileLock(path)))


def _check_journal(path: str) -> None:
    """Raise if an existing file is no journal, before a line is added to it."""
    if os.path.isfile(path):
        with open(path, "rb") as file:
            first = file.readline()
        start = b'{"op_code"'
        if not first.startswith(start) and (first.endswith(b"\n") or not start.startswith(first)):  # an unfinished line is cut
            raise ValueError("the file exists, and is no journal of Optuna")


def _proxy(name: str) -> Any:
    host, _, port = name.removeprefix(PROXY).partition(":")
    if not (port or "0").isdecimal():
        raise SearchError("the name of the storage, grpc://…, can't be read: write grpc://HOST:PORT")
    try:
        with quiet():
            storage = optuna().storages.GrpcStorageProxy(host=host or "localhost", port=int(port or 13000))
    except ImportError as error:
        raise MissingError(f"the storage {name} needs gRPC: pip install grpcio protobuf ({error})") from error
    try:
        storage.wait_server_ready(timeout=WAIT)
    except Exception:
        storage.close()
        raise
    return storage


def check_exists(storage: Any) -> None:
    """Raise if a storage is a file that does not exist, before it would be created."""
    name = os.fspath(storage) if isinstance(storage, (str, os.PathLike)) else ""
    path = name.removeprefix("sqlite:///")
    if path and "://" not in path and not os.path.exists(path):
        raise SearchError(f"there is no file {path}: name the storage of a search that was begun")


def default_artifacts(storage: Any) -> str:
    """The folder of artifacts beside a journal or an SQLite file; a temporary one for a storage in memory."""
    if storage is None:
        return tempfile.mkdtemp(prefix="outgrow-search-")
    name = os.fspath(storage) if isinstance(storage, (str, os.PathLike)) else ""
    path = name.removeprefix("sqlite:///") if name.startswith("sqlite:///") else name
    if not path or "://" in path:
        raise SearchError(
            "this storage has no folder for the models of trials: pass artifacts= to outgrow.search or outgrow.Search, a "
            "folder that all workers share, or an artifact store of Optuna"
        )
    return f"{os.path.abspath(path)}-artifacts"


def create_study(storage: Any, name: str, objectives: Objectives, facts: dict[str, Any]) -> tuple[Any, bool]:
    """The study of that name, and whether it was created here; SearchError if an existing one is of another search."""
    library = optuna()
    with reachable(), quiet():
        try:
            study = library.create_study(storage=storage, study_name=name, directions=list(objectives.directions))
            study.set_metric_names(list(objectives.names))
            study.set_user_attr(FACTS, {"version": VERSION, "objectives": list(objectives.names), **facts})
            return study, True
        except library.exceptions.DuplicatedStudyError:
            study = library.load_study(storage=storage, study_name=name)
    adopt_study(study, objectives)  # whoever created it may have been killed before it had named the objectives
    return study, False


def load_study(storage: Any, name: str | None) -> Any:
    """An existing study, of which the name may be left out if there is only one."""
    library = optuna()
    with reachable(), quiet():
        names = [one.study_name for one in library.get_all_study_summaries(storage=storage)]
        if name is None and len(names) == 1:
            (name,) = names
        if name not in names:
            if not names:
                raise SearchError("the storage holds no study")
            said = f"there is no study {name!r}" if name else f"the storage holds {len(names)} studies: name one"
            raise SearchError(f"{said}; there are {', '.join(names)}")
        return library.load_study(storage=storage, study_name=name)


def check_facts(study: Any, facts: dict[str, Any]) -> None:
    """Raise if a study was begun with another sampler or seed: its trials are not those of this search."""
    begun = study.user_attrs.get(FACTS, {})
    for name in ("sampler", "seed"):
        if name in begun and begun[name] != facts[name]:
            raise SearchError(
                f"the study {study.study_name!r} was begun with {name}={begun[name]!r}, and this search has {name}="
                f"{facts[name]!r}: name another study, or continue it with {name}={begun[name]!r}"
            )


def objectives_of(study: Any) -> Objectives:
    """The objectives of a stored study."""
    directions = tuple(direction.name.lower() for direction in study.directions)
    names = study.metric_names or [f"objective {number}" for number in range(len(directions))]
    return Objectives(tuple(names), directions)


def check_study(study: Any, objectives: Objectives) -> None:
    """Raise if a study has other objectives than a search."""
    names = study.metric_names or objectives.names  # if it has none, another worker has created it, and names them next
    found = Objectives(tuple(names), objectives_of(study).directions)
    if found != objectives:
        texts = [", ".join(f"{n} ({w})" for n, w in zip(o.names, o.directions, strict=True)) for o in (found, objectives)]
        raise SearchError(
            f"the study {study.study_name!r} has the objectives {texts[0]}, and the search {texts[1]}: name another study"
        )


def adopt_study(study: Any, objectives: Objectives) -> None:
    """Name the objectives of a study that was created elsewhere; SearchError if it has others."""
    check_study(study, objectives)
    with reachable(), quiet():
        if not study.metric_names:
            study.set_metric_names(list(objectives.names))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's lines on the terminal, and without its warnings about names that may change (of metrics, the proxy)."""
    logging = optuna().logging
    level = logging.get_verbosity()
    logging.set_verbosity(max(level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna().exceptions.ExperimentalWarning)
            yield
    finally:
        logging.set_verbosity(level)


@contextlib.contextmanager
def reachable() -> Iterator[None]:
    """Report errors of a storage as a SearchError."""
    try:
        yield
    except SearchError:
        raise
    except Exception as error:
        if isinstance(error, json.JSONDecodeError):
            raise SearchError(DAMAGED.format(error)) from error
        if not is_of_storage(error):
            raise
        if is_refused(error):
            raise SearchError(
                f"the storage refuses what a search needs ({said(error)}): the study is as it was; check the rights of its user"
            ) from error
        raise SearchError(
            f"the storage can't be reached ({said(error)}): the study is as it was; start the search again when the storage is "
            "back"
        ) from error
