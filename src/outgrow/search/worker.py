"""A worker: take trials of a study, one after the other, until all are done. Any number of workers may share a study."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from outgrow.errors import GrowthError, SearchError
from outgrow.search.artifacts import GoneError, MisfitError, Models, StoreError
from outgrow.search.dashboard_note import note, write_note
from outgrow.search.description import Search
from outgrow.search.leases import Lease, Observer
from outgrow.search.objectives import DivergedError, ReturnedError
from outgrow.search.patience import impatient
from outgrow.search.records import COMPLETE, FAIL, Book, Record, pareto_front
from outgrow.search.run_trial import run_trial
from outgrow.search.storage_errors import UnreachableError, said
from outgrow.search.storages import optuna, patient, reachable
from outgrow.text.passwords import hide_passwords
from outgrow.text.terminal import line

POLL = 0.1  # seconds between two looks at the study, while other workers run the last trials; they become longer
SLOWEST = 2.0
FILLED = "filled"  # the study's attribute which says that its trials were added
LIBRARIES = ("site-packages", "dist-packages", "outgrow")  # folders of code that is not the user's
NOTE = 10.0  # seconds between two versions of the study's note
SETTLE = 2.0  # seconds for the worker that has created the study to add its trials
LONGEST = 4000  # letters of a reason: databases limit the length of an attribute


class LostError(Exception):
    """Another worker has ended this worker's trial, because it took this worker for dead."""


class Worker:
    """Carry out trials of a study.

    quiet: print nothing on the terminal. own_sampler: draw hyperparameters that the training function requests by Optuna's
    random sampler with a seed for each trial, so that a continued search draws the same; otherwise by the study's sampler.
    """

    def __init__(self, search: Search, study: Any, models: Models, quiet: bool = False, own_sampler: bool = True) -> None:
        self.search, self.models, self.quiet, self.own_sampler = search, models, quiet, own_sampler
        self.storage, self.study = _patient(study)
        self.observer, self.outages = Observer(search.lease), 0
        self.noted = time.monotonic()
        self.forgiven: set[int] = set()  # attempts at the first trial that failed before this run

    def run(self, creator: bool, most: int | None = None, minutes: float | None = None) -> int:
        """Work until all trials are done, or this worker has carried out `most`; begin none after so many minutes.

        Returns how many trials it has carried out.
        """
        done, pause, end = 0, POLL, math.inf if minutes is None else time.monotonic() + 60 * minutes
        with reachable():
            if creator:
                self._fill(self.book())
            else:
                self._let_creator_fill()
            self.study.set_user_attr(FILLED, True)
            while (failed := self.book().failed_root()) is not None:
                self.forgiven |= {one.number for one in self.book().of_slot(0) if one.number <= failed.number}
        while (most is None or done < most) and time.monotonic() < end:
            with reachable():
                book = self.book()
                if book.finished:
                    break
                self._end_stale(book)
                self._refuse_failed_root(book)
                self._fill(book)
                taken = self._take(self.book())
            if taken is None:
                time.sleep(min(pause, self.search.lease))
                pause = min(2 * pause, SLOWEST)
                continue
            pause = POLL
            with reachable():
                done += self._carry_out(taken)
                if time.monotonic() - self.noted > NOTE:
                    self._note()
        with reachable():
            self._note()
        return done

    def _note(self) -> None:
        """Write the family tree to the study's note, for `optuna-dashboard`."""
        write_note(self.study, note(self.book().settled(), self.search.objectives))
        self.noted = time.monotonic()

    def book(self) -> Book:
        """The present state of the study. A failed training of the parent itself counts only in the run in which it fails."""
        records = [Record.of(trial) for trial in self.study.get_trials(deepcopy=False)]
        records = [replace(one, outcome="interrupted") if one.number in self.forgiven else one for one in records]
        return Book(records, self.search.trials, self.search.attempts)

    def _let_creator_fill(self) -> None:
        """Wait while the worker that has created the study adds its trials."""
        if self.study.user_attrs.get(FILLED):
            return
        seen, since = -1, time.monotonic()
        while (book := self.book()).untried() and time.monotonic() - since < SETTLE:
            if len(book.records) != seen:
                seen, since = len(book.records), time.monotonic()
            time.sleep(POLL / 2)

    def _fill(self, book: Book) -> None:
        """Add an attempt to each slot that needs one; it repeats the growth that the last attempt has begun."""
        for slot in book.missing():
            tried = book.of_slot(slot)
            attrs: dict[str, Any] = {"slot": slot}
            params: dict[str, Any] = {}
            if tried:
                last = self.study.get_trials(deepcopy=False)[tried[-1].number]
                attrs["retry_of"] = tried[-1].number
                if "moves" in last.user_attrs and slot:
                    names = ("parent", "shrunk_from", "growth", "moves")
                    attrs |= {name: last.user_attrs[name] for name in names if name in last.user_attrs}
                params = last.params
            self.study.enqueue_trial(params, user_attrs=attrs)

    def _end_stale(self, book: Book) -> None:
        """End running trials whose worker is dead; their slots are then filled again."""
        library, trials = optuna(), self.study.get_trials(deepcopy=False)
        outages = getattr(self.storage, "outages", 0)
        if outages != self.outages:
            self.outages = outages
            self.observer.forget()
        for record in book.running():
            trial = trials[record.number]
            if self.observer.stale(trial):
                try:
                    self.storage.set_trial_state_values(trial._trial_id, library.trial.TrialState.FAIL)
                    self._say(f"trial {record.number}: its worker is gone; it is taken up again")
                except library.exceptions.UpdateFinishedTrialError:
                    continue  # another worker was faster, or it has ended after all

    def _refuse_failed_root(self, book: Book) -> None:
        """Raise if the training of the parent itself has failed in this run."""
        failed = book.failed_root()
        if failed is not None:
            reason = failed.error or f"it was lost {self.search.attempts} times, so it seems to end its process"
            raise SearchError(
                f"trial {failed.number}, the training of the parent itself, failed, so that there is nothing to grow: {reason}"
            )

    def _take(self, book: Book) -> Any:
        """A trial that waits, now this worker's own; None if there is none at present."""
        library = optuna()
        for record in book.waiting():
            identity = self.study.get_trials(deepcopy=False)[record.number]._trial_id
            try:
                if not self.storage.set_trial_state_values(identity, library.trial.TrialState.RUNNING):
                    continue
            except library.exceptions.UpdateFinishedTrialError:
                continue
            if self.book().superfluous(record):
                self._end(identity, "duplicate", "another attempt at the same trial is under way, or has ended")
                continue
            return identity
        return None

    def _carry_out(self, identity: int) -> int:
        """Carry out a trial, and store its result; 1 if it counts."""
        library = optuna()
        write, renew = (partial(one.set_trial_user_attr, identity, "lease") for one in (self.storage, impatient(self.storage)))
        try:
            with Lease(write, self.search.lease / 4, renew) as lease:
                self._train(identity, lease)
            if lease.missed:
                self.observer.forget()
        except (LostError, library.exceptions.UpdateFinishedTrialError):
            self._say("a trial was taken up by another worker, and its result here is not counted")
            return 0
        return 1

    def _train(self, identity: int, lease: Lease) -> None:
        library = optuna()
        states = library.trial.TrialState
        if self.own_sampler:
            slot = self.storage.get_trial(identity).user_attrs["slot"]
            self.study.sampler = library.samplers.RandomSampler(seed=self.search.seed * 1_000_003 + slot)
        trial = library.trial.Trial(self.study, identity)
        try:
            values = run_trial(self.search, self.models, trial, self.book().records)
        except library.exceptions.UpdateFinishedTrialError:
            raise
        except library.exceptions.TrialPruned:
            self.storage.set_trial_state_values(identity, states.PRUNED)
            self._report(identity)
            return
        except UnreachableError:  # the trial is taken up again
            raise
        except DivergedError as error:
            self._end(identity, "diverged", str(error))
            return
        except (
            GoneError,
            MisfitError,
            ReturnedError,
            StoreError,
        ) as error:  # every trial of this worker would fail: another one takes it up
            self._end(identity, "interrupted", str(error))
            raise
        except Exception as error:
            missing = "; the search has no optimizer=, so that train gets None" if self.search.optimizer is None else ""
            self._end(identity, "raised", _where(error) + (missing if "NoneType" in str(error) else ""))
            return
        except BaseException:  # Ctrl-C: the next worker takes it up again
            self._end(identity, "interrupted", "interrupted")
            raise
        held = self.storage.get_trial(identity).user_attrs.get("lease", {})
        if lease.lost or held.get("owner") != lease.owner:
            raise LostError
        try:
            self.storage.set_trial_state_values(identity, states.COMPLETE, values)
        except library.exceptions.UpdateFinishedTrialError:  # the connection may have broken when that was already carried out
            if self.storage.get_trial(identity).state != states.COMPLETE:
                raise
        self._report(identity)

    def _end(self, identity: int, outcome: str, reason: str) -> None:
        """End a trial without a result."""
        self.storage.set_trial_user_attr(identity, "outcome", outcome)
        self.storage.set_trial_user_attr(identity, "error", hide_passwords(reason)[:LONGEST])
        self.storage.set_trial_state_values(identity, optuna().trial.TrialState.FAIL)
        if outcome != "duplicate":
            self._report(identity)

    def _report(self, identity: int) -> None:
        if self.quiet:
            return
        book, record = self.book(), Record.of(self.storage.get_trial(identity))
        self._say(progress(record, book.records, self.search, len(book.settled())))

    def _say(self, text: str) -> None:
        if not self.quiet:
            line(text)


def _patient(study: Any) -> tuple[Any, Any]:
    """The storage of a study, and the study in it, that wait while they can't be reached."""
    storage = patient(study._storage)
    if storage is study._storage:
        return storage, study
    options = {"sampler": study.sampler, "pruner": study.pruner}
    return storage, optuna().load_study(storage=storage, study_name=study.study_name, **options)


def progress(record: Record, records: Sequence[Record], search: Search, settled: int) -> str:
    """One line about a trial that has ended."""
    from_ = f"from {record.parent}" if record.parent is not None else "" if record.slot else "the parent itself"
    what = "; ".join(record.growth) or ("" if record.parent is None else "trained on")
    done = " · ".join(filter(None, (from_, what)))
    head = " ".join(filter(None, (f"{settled}/{search.trials} trial {record.number}", done)))
    if record.state == FAIL:
        outcome = record.outcome or "failed"
        return f"{head}: {record.error if outcome in record.error else f'{outcome}: {record.error}'}"
    if record.state != COMPLETE:
        return f"{head}: {record.state.lower()}"
    values = ", ".join(f"{name} {value:.4g}" for name, value in zip(search.objectives.names, record.values, strict=True))
    best = any(one.number == record.number for one in pareto_front(records, search.objectives))
    return f"{head}: {values}{' ★' if best else ''}"


def _where(error: Exception) -> str:
    """An error with the last line of the user's own code that led to it, or where it was raised."""
    if isinstance(error, GrowthError):
        return str(error)
    if isinstance(error, optuna().exceptions.StorageInternalError):
        return f"the storage refuses what the trial has written ({said(error)})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in Path(frame.filename).parts for part in LIBRARIES)]
    place = [f" ({frame.filename}, line {frame.lineno})" for frame in (own or frames)[-1:]]
    return ": ".join(filter(None, (type(error).__name__, str(error)))) + "".join(place)
