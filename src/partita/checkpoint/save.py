"""Saving: every rank writes its file of a checkpoint, and the first rank makes it visible when all files are durable.

Training waits for a copy into host memory. The checkpoint is written from that copy while training continues. If states
are stored on disk, or the host has no memory for the copies, the states are streamed to the file, and training waits.
"""

import itertools
import logging
import secrets
import threading
from pathlib import Path

from partita.checkpoint.backend import Backend, Draft, Request
from partita.checkpoint.content import Content
from partita.checkpoint.training_state import TrainingState
from partita.comm.collective_errors import find_memory_shortfall, shared_errors
from partita.memory.capacity import HOST_SHARE, host_memory

_log = logging.getLogger("partita")


class Saver:
    """The writer of one engine's checkpoints, one at a time.

    Its methods are collectives, except those of the background thread.
    """

    def __init__(self, content: Content, training: TrainingState, backend: Backend) -> None:
        self._content = content
        self._training = training
        self._backend = backend
        self._all_ranks = content.runtime.collectives.all_ranks
        self._is_first = content.runtime.collectives.mesh.is_first_replica()
        self._run = ""
        self._num_saves = 0
        self._draft: Draft | None = None
        self._thread: threading.Thread | None = None
        self._written = threading.Event()  # the thread has finished the checkpoint
        self._error: Exception | None = None

    def save(self, request: Request) -> Path:
        """Save a checkpoint; return its folder. A checkpoint in the background is complete only after :meth:`wait`.

        Raises:
            PartitaError: on all ranks, if one of them cannot write.
        """
        self.wait()
        if not self._run:
            self._run = str(self._all_ranks.exchange_objects(secrets.token_hex(4), "engine.save")[0])
        self._num_saves += 1
        self._draft = self._backend.draft(request, f"{self._run}-{self._num_saves}")
        try:
            self._save(self._draft, background=request.background)
        except BaseException:
            self._abandon()
            raise
        return request.folder / f"step-{request.step}"

    def _save(self, draft: Draft, *, background: bool) -> None:
        with shared_errors(self._all_ranks):
            states = self._content.segments()
            boxes = [box for state in states for box in state.boxes] + self._training.boxes()
            others = [value for state in states for value in state.others] + self._training.values()
            draft.begin(boxes, others)
        with shared_errors(self._all_ranks):
            draft.join()
        batches = itertools.chain(self._content.batches(states), self._training.batches())
        if background and not self._on_disk and self._host_fits(draft.snapshot_bytes):
            with shared_errors(self._all_ranks):
                draft.snapshot(batches)
            # Not a daemon, so that the process ends only after the checkpoint is complete.
            thread = threading.Thread(target=self._write, args=(draft,), name="partita checkpoint")
            self._written.clear()
            thread.start()
            self._thread = thread
        else:
            with shared_errors(self._all_ranks):
                draft.write(batches)
            with shared_errors(self._all_ranks):
                if self._is_first:
                    draft.commit()
            draft.leave()

    def _write(self, draft: Draft) -> None:
        """Write the snapshot. Runs in the background thread."""
        try:
            draft.write()
            if self._is_first:
                draft.commit()
        except Exception as error:
            self._error = error
            draft.leave(error)
            _log.warning("a checkpoint was not saved: writing its files failed; the next save, or close, says why")
        else:
            draft.leave()
        finally:
            self._written.set()

    def wait(self) -> None:
        """Wait until the checkpoint that is written in the background is visible.

        Raises:
            PartitaError: on all ranks, if one of them could not write.
        """
        if self._thread is not None or self._error is not None:
            try:
                with shared_errors(self._all_ranks):
                    self._join()
            except Exception:
                self._abandon()
                raise

    def _join(self) -> None:
        if self._thread is not None:
            # Ctrl-C may interrupt this. In Python 3.11 and 3.12, a thread whose `join` was interrupted counts as ended.
            self._written.wait()
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _abandon(self) -> None:
        """Abandon a checkpoint that failed, and remove its files. No rank writes any more."""
        assert self._draft is not None
        self._draft.leave()
        if self._is_first:
            self._draft.discard()

    @property
    def _on_disk(self) -> bool:
        return any(segment.plan.uses_disk for unit in self._content.runtime.units for segment in unit.segments)

    def _host_fits(self, num_bytes: int) -> bool:
        """Return True if every node has host memory for the copies of its ranks; the same on all ranks."""
        free = int(HOST_SHARE * host_memory()[1])
        shortfall = find_memory_shortfall(num_bytes, free, self._all_ranks, "engine.save")
        if shortfall is not None and self._is_first:
            _log.info("checkpoint: training waits for it, as no copy of the states fits in %s", shortfall.memory)
        return shortfall is None
